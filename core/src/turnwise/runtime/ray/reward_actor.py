"""The Ray actor of a reward worker: scores finished episodes with a reward that it builds from the blueprint."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar, cast

from attrs import evolve
from structlog.contextvars import bound_contextvars

from turnwise.errors import ConfigError, InfrastructureError, is_cancelled
from turnwise.record.result import as_score
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.pool_client import PoolClientActor, PoolSpec, keep_error
from turnwise.runtime.remote.actor_calls import in_order
from turnwise.runtime.remote.actor_process import prepare_process
from turnwise.runtime.remote.episode_snapshot import EpisodeSnapshot
from turnwise.runtime.remote.result_wire import ToDriver, unpack_episodes
from turnwise.runtime.remote.reward_pool import RewardFailure, RewardReply

T = TypeVar("T")
_FLUSH_S: Final = 0.5
"""Seconds in which the last reply of a blocked actor leaves its process."""


class RewardActor(PoolClientActor):
    """
    Scores finished episodes, and groups of them.

    An async reward scores many episodes at once on the actor's event loop. A synchronous one has a thread and scores
    one episode after the other, so that the event loop stays responsive.
    """

    @keep_error
    def __init__(self, name: str, blueprint: Blueprint, pools: Mapping[str, PoolSpec], scores_groups: bool) -> None:
        super().__init__(name, blueprint.make_router, pools)
        judge = self._pools.get("judge")
        self._reward = blueprint.make_reward(judge)
        self._group_reward = blueprint.make_group_reward(judge) if scores_groups else None
        if self._reward is None and self._group_reward is None:
            raise ConfigError("runtime.reward_workers: there is no reward; configure one, or set it to 0")
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._thread_lock = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._stuck = ""
        self._num_scored = self._num_running = 0
        self._ended = asyncio.Event()

    @in_order
    async def watch(self) -> None:
        """Wait for `stop`; raise an error if the thread of the reward is blocked."""
        prepare_process()
        await self._stopped.wait()
        if self._stuck:
            raise InfrastructureError(self._stuck)

    async def score(self, snapshot: EpisodeSnapshot, reward_s: float) -> RewardReply:
        """Score an episode within seconds; the reply contains an error of the reward."""
        reward: Any = self._reward
        with bound_contextvars(episode=snapshot.uid, key=snapshot.key):  # as in the worker, for lines of the reward
            reply = await self._reply(reward.score, snapshot.as_episode(), reward_s)
        return evolve(reply, recorded=tuple(snapshot.recorded), reports=tuple(snapshot.reports))

    async def score_group(self, packed: ToDriver, seconds: float) -> RewardReply:
        """Score the episodes of a group within seconds, as `score` does one episode."""
        reward: Any = self._group_reward
        episodes = [each for _number, each in unpack_episodes(packed)]
        with bound_contextvars(keys=[each.key for each in episodes]):
            return await self._reply(reward.score_group, episodes, seconds)

    async def _reply(self, score: Callable[[T], Any], argument: T, reward_s: float) -> RewardReply:
        self._num_running += 1
        in_place = self._score_on_loop if inspect.iscoroutinefunction(score) else self._score_in_thread
        try:
            scores = _as_scores(await in_place(partial(score, argument), reward_s))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | GeneratorExit) and is_cancelled():
                raise
            return RewardReply(failure=RewardFailure.of(error))
        finally:
            self._num_running -= 1
            self._ended.set()
        self._num_scored += 1
        return RewardReply(scores=scores)

    async def finish(self) -> None:
        """Return when no episode is scored any more."""
        while self._num_running:
            self._ended.clear()
            await self._ended.wait()

    async def ping(self) -> int:
        """Return the number of scores. A reply shows that the event loop is not blocked."""
        return self._num_scored

    async def stats(self) -> dict[str, float]:
        """Return the number of scores."""
        return {"num_scored": float(self._num_scored), "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Let `watch` return."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stopped.set()

    async def _score_on_loop(self, score: partial[Any], reward_s: float) -> object:
        try:
            async with asyncio.timeout(reward_s) as timeout:
                return await score()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise _timeout_error(score, reward_s) from None

    async def _score_in_thread(self, score: partial[Any], reward_s: float) -> object:
        loop = asyncio.get_running_loop()
        async with self._thread_lock:
            if self._stuck:  # the thread was blocked during the wait for the lock
                raise InfrastructureError(self._stuck)
            running = loop.run_in_executor(self._thread, copy_context().run, score)
            done, _ = await asyncio.wait([running], timeout=reward_s)
            if not done:
                # Python cannot stop a thread, so the process must end, and the driver starts another one.
                self._stuck = f"a score blocked its thread for longer than {reward_s:g} s"
                loop.call_later(_FLUSH_S, self._stopped.set)  # the reply must leave before this process ends
                raise _timeout_error(score, reward_s)
        scores = running.result()
        return await scores if inspect.isawaitable(scores) else scores


def _timeout_error(score: partial[Any], reward_s: float) -> TimeoutError:
    owner = getattr(score.func, "__self__", score.func)
    return TimeoutError(f"reward {type(owner).__name__} took longer than {reward_s:g} s")


def _as_scores(answer: object) -> object:
    """Return the scores of an answer, which pickle; `TypeError` for a value that is no score."""
    if isinstance(answer, list | tuple) or getattr(answer, "shape", None):
        return [as_score(each) for each in cast("Iterable[object]", answer)]
    return as_score(answer)
