"""The Ray actor of a reward worker: scores finished episodes with a reward that it builds from the blueprint."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from turnwise.episode.containment import contain_exits
from turnwise.errors import ConfigError, InfrastructureError, is_cancelled
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.pool_client import PoolClientActor, PoolSpec
from turnwise.runtime.remote.episode_snapshot import EpisodeSnapshot
from turnwise.runtime.remote.reward_pool import RewardFailure, RewardReply
from turnwise.types import TokenScore, TrajectoryScore, TurnScore

_FLUSH_S: Final = 0.5
"""Seconds in which the last reply of a blocked actor leaves its process."""


class RewardActor(PoolClientActor):
    """
    Scores finished episodes.

    An async reward scores many episodes at once on the actor's event loop. A synchronous one has a thread and scores
    one episode after the other, so that the event loop stays responsive.
    """

    def __init__(self, name: str, blueprint: Blueprint, pools: Mapping[str, PoolSpec]) -> None:
        super().__init__(name, blueprint.make_router, pools)
        reward = blueprint.make_reward(self._pools.get("judge"))
        if reward is None:
            raise ConfigError("runtime.reward_workers: there is no reward; configure one, or set it to 0")
        self._reward = reward
        self._is_async = inspect.iscoroutinefunction(reward.score)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._thread_lock = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._stuck = ""
        self._num_scored = 0

    async def watch(self) -> None:
        """Wait for `stop`; raise an error if the thread of the reward is blocked."""
        contain_exits()
        await self._stopped.wait()
        if self._stuck:
            raise InfrastructureError(self._stuck)

    async def score(self, snapshot: EpisodeSnapshot, reward_s: float) -> RewardReply:
        """Score an episode within seconds; the reply contains an error of the reward."""
        try:
            scores = await (self._score_on_loop if self._is_async else self._score_in_thread)(snapshot, reward_s)
            _check_scores(scores)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | GeneratorExit) and is_cancelled():
                raise
            return RewardReply(recorded=tuple(snapshot.recorded), failure=RewardFailure.of(error))
        self._num_scored += 1
        return RewardReply(scores=scores, recorded=tuple(snapshot.recorded))

    async def ping(self) -> int:
        """Return the number of scored episodes. A reply shows that the event loop is not blocked."""
        return self._num_scored

    async def stats(self) -> dict[str, float]:
        """Return the number of scored episodes."""
        return {"num_scored": float(self._num_scored), "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Let `watch` return."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stopped.set()

    async def _score_on_loop(self, snapshot: EpisodeSnapshot, reward_s: float) -> object:
        try:
            async with asyncio.timeout(reward_s) as timeout:
                scoring: Any = self._reward.score(snapshot.as_episode())
                return await scoring
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._timeout_error(reward_s) from None

    async def _score_in_thread(self, snapshot: EpisodeSnapshot, reward_s: float) -> object:
        loop = asyncio.get_running_loop()
        async with self._thread_lock:
            if self._stuck:  # the thread was blocked during the wait for the lock
                raise InfrastructureError(self._stuck)
            running = loop.run_in_executor(self._thread, self._reward.score, snapshot.as_episode())
            done, _ = await asyncio.wait([running], timeout=reward_s)
            if not done:
                # Python cannot stop a thread, so the process must end, and the driver starts another one.
                self._stuck = f"a score blocked its thread for longer than {reward_s:g} s"
                loop.call_later(_FLUSH_S, self._stopped.set)  # the reply must leave before this process ends
                raise self._timeout_error(reward_s)
        scores = running.result()
        return await scores if inspect.isawaitable(scores) else scores

    def _timeout_error(self, reward_s: float) -> TimeoutError:
        return TimeoutError(f"reward {type(self._reward).__name__} took longer than {reward_s:g} s")


def _check_scores(scores: object) -> None:
    """Raise `TypeError` for a return value that is no score, and may not pickle."""
    for score in scores if isinstance(scores, list | tuple) else (scores,):
        if not isinstance(score, int | float | TrajectoryScore | TurnScore | TokenScore):
            raise TypeError(f"score returned {score!r}, expected a TrajectoryScore, TurnScore or TokenScore")
