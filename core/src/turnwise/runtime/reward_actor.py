"""The Ray actor that scores episodes: it builds the reward, and the judge's links, from the blueprint."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from turnwise.errors import ConfigError, InfrastructureError, cancelled_by_nobody
from turnwise.runtime.ended_episode import EndedEpisode
from turnwise.runtime.pool_client import Peer, PoolClientActor
from turnwise.runtime.ray_actors import Blueprint
from turnwise.runtime.reward_pool import RewardAnswer, RewardFailure
from turnwise.types import TokenScore, TrajectoryScore, TurnScore

_LAST_WORDS_S: Final = 0.5


class RewardActor(PoolClientActor):
    """
    Scores episodes that have ended.

    An async reward scores many at once on the actor's event loop. Any other has a thread, and scores one after the
    other, so that the loop goes on answering.
    """

    def __init__(self, name: str, blueprint: Blueprint, peers: Mapping[str, Peer]) -> None:
        super().__init__(name, blueprint.make_router, peers)
        judge = self._pools.get("judge")
        reward = blueprint.make_reward() if judge is None else blueprint.make_reward(judge)
        if reward is None:
            raise ConfigError("runtime.reward_workers: there is no reward to score with; configure one, or set it to 0")
        self._reward = reward
        self._in_loop = inspect.iscoroutinefunction(reward.score)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()
        self._stuck = ""
        self._num_scored = 0

    async def watch(self) -> None:
        """Return when told to stop; raise when the thread of the reward does not come back."""
        await self._ended.wait()
        if self._stuck:
            raise InfrastructureError(self._stuck)

    async def score(self, ended: EndedEpisode, reward_s: float) -> RewardAnswer:
        """Score an episode within seconds; what the reward raises is in the answer."""
        try:
            scores = await (self._on_loop(ended, reward_s) if self._in_loop else self._in_thread(ended, reward_s))
            _refuse_what_cannot_travel(scores)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not cancelled_by_nobody():
                raise
            return RewardAnswer(recorded=tuple(ended.recorded), failure=RewardFailure.of(error))
        self._num_scored += 1
        return RewardAnswer(scores=scores, recorded=tuple(ended.recorded))

    async def ping(self) -> int:
        """Answer with how many were scored, and so show that the event loop runs."""
        return self._num_scored

    async def stats(self) -> dict[str, float]:
        """Return what was done here."""
        return {"num_scored": float(self._num_scored), "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Let `watch` return."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._ended.set()

    async def _on_loop(self, ended: EndedEpisode, reward_s: float) -> Any:
        try:
            async with asyncio.timeout(reward_s) as timeout:
                scoring: Any = self._reward.score(ended.as_episode())
                return await scoring
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._late(reward_s) from None

    async def _in_thread(self, ended: EndedEpisode, reward_s: float) -> Any:
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._stuck:
                raise InfrastructureError(self._stuck)
            running = loop.run_in_executor(self._thread, self._reward.score, ended.as_episode())
            done, _ = await asyncio.wait([running], timeout=reward_s)
            if not done:
                self._stuck = f"a score blocked its thread for longer than {reward_s:g} s"
                loop.call_later(_LAST_WORDS_S, self._ended.set)  # the answer leaves before this process does
                raise self._late(reward_s)
        answer = running.result()
        return await answer if inspect.isawaitable(answer) else answer

    def _late(self, reward_s: float) -> TimeoutError:
        return TimeoutError(f"reward {type(self._reward).__name__} took longer than {reward_s:g} s")


def _refuse_what_cannot_travel(scores: Any) -> None:
    for score in scores if isinstance(scores, list | tuple) else (scores,):
        if not isinstance(score, int | float | TrajectoryScore | TurnScore | TokenScore):
            raise TypeError(f"score returned {score!r}, expected a TrajectoryScore, TurnScore or TokenScore")
