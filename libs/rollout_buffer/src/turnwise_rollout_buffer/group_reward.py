"""
The base class of group rewards: it collects the episodes of each group, and scores them together.

A group is the episodes of one task, training step and mode. It is scored once, when all of them have ended. Failed
episodes are delivered as they are, and the reward does not see them. If a call ends before all members of a group have
ended, none of them has a score: the ended ones wait, unfinished, for the call that resumes the others.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, Final

import numpy as np
from attrs import define, evolve, field

from turnwise import EpisodeResult, Score, Status, TrajectoryScore
from turnwise.errors import BoundaryError, Owner
from turnwise.protocols import GroupCall
from turnwise.record.result import as_score, token_scores, total_score
from turnwise.types import Fault
from turnwise_rollout_buffer.config import GroupRewardConfig
from turnwise_rollout_buffer.groups import GroupKey, group_key

_SCORED: Final = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.TIMED_OUT})
GROUP_SIZE: Final = "group_size"
"""Metric of an episode: the number of episodes that were scored with it, or that failed with it for want of a score."""
EPISODE_REWARD: Final = "episode_reward"
"""Metric of a scored episode: its reward before its group was scored, if it had one."""


class GroupReward(ABC):
    """
    Scores the ended episodes of a task together. A subclass has a method `score_group`; it may be async.

    Args:
        config: its options, with those of every group reward.
        resources: of the run.
    """

    def __init__(self, config: GroupRewardConfig, resources: object = None) -> None:
        self.config: Any = config
        self.resources: Any = resources

    @abstractmethod
    def score_group(self, episodes: Sequence[EpisodeResult]) -> Sequence[Score | float] | Awaitable[Any]:
        """
        Return a number or a `Score` for each episode, in their order.

        Args:
            episodes: of one task in the order of `rollout_n`, at least one and none that failed; each with its
                messages, records and metrics, and with the scores of the run's `reward`, if it has one.

        In an episode with several records, the score lies on the last one that is trained.

        An exception fails these episodes, owned by `reward`.
        """

    @asynccontextmanager
    async def collect(self, call: GroupCall) -> AsyncIterator[Callable[[int, EpisodeResult], None]]:
        """Yield the function that gets each episode of a call when it ends; at the end, all are delivered."""
        groups = _CallGroups(self, call)
        try:
            yield groups.add
            await groups.finish()
        except BaseException:
            groups.give_up()
            raise

    async def score_members(self, members: Sequence[EpisodeResult], call: GroupCall) -> _Scored:
        """Return the members of a group, all of which have ended, scored or failed."""
        shown = sorted(filter(_can_score, members), key=attrgetter("rollout_n"))
        size = len(members)
        num_failed = size - len(shown)
        if num_failed > (1.0 - self.config.min_fraction) * size + 1e-9:
            text = f"{num_failed} of {size} episodes of the group failed, min_fraction is {self.config.min_fraction:g}"
            scored = [_failed(each, len(shown), "reward", "IncompleteGroup", f"{call.label}: {text}") for each in shown]
        else:
            scored = await self._score(shown, call) if shown else []
        changed = {id(before): after for before, after in zip(shown, scored, strict=True)}
        return [changed.get(id(each), each) for each in members]

    def unscored(self, episode: EpisodeResult) -> EpisodeResult | None:
        """
        Return an ended episode as it was before its group was scored; None if only another run of it can tell.

        The score that the run's `reward` gave is back as one number, on the last record that is trained.
        """
        if GROUP_SIZE not in episode.metrics.extra:
            return episode
        if episode.status is Status.FAILED:  # with its group; how it ended is not known any more
            return None
        extra = dict(episode.metrics.extra)
        del extra[GROUP_SIZE]
        own = extra.pop(EPISODE_REWARD, None)
        scores = () if own is None else _scores_of_one(episode, own)
        return evolve(episode, scores=scores, metrics=evolve(episode.metrics, extra=extra))

    async def _score(self, episodes: list[EpisodeResult], call: GroupCall) -> _Scored:
        started, deadline_s = time.perf_counter(), self.config.deadline_s
        owner: Owner = "reward"
        try:
            scores = scores_of(episodes, await call.ask(episodes, deadline_s))
        except TimeoutError:
            error: BaseException = TimeoutError(f"it took longer than {deadline_s:g} s")
        except BoundaryError as failure:
            owner, error = failure.owner, failure.cause
        except (TypeError, ValueError) as wrong:
            error = wrong
        else:
            seconds = time.perf_counter() - started
            pairs = zip(episodes, scores, strict=True)
            return [_with_scores(each, own, len(episodes), seconds) for each, own in pairs]
        message = f"{call.label}: {' '.join(str(error).split()) or type(error).__name__}"
        frames = "".join(traceback.format_exception(error)[-40:])
        return [_failed(each, len(episodes), owner, type(error).__name__, message, frames) for each in episodes]


_Scored = list[EpisodeResult]
_Members = list[tuple[int, EpisodeResult]]


def scores_of(episodes: Sequence[EpisodeResult], answer: object) -> list[tuple[Score, ...]]:
    """
    Return the answer of a group reward as the scores of each episode's records.

    Raises:
        TypeError: the answer is no list, or has something that is neither a number nor a score.
        ValueError: there is not one score for each episode, or one does not fit or is not finite.
    """
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence | np.ndarray):
        raise TypeError(f"score_group returned {type(answer).__name__}, expected a list with a score for each episode")
    if len(answer) != len(episodes):
        raise ValueError(f"score_group returned {len(answer)} scores for {len(episodes)} episodes")
    return [_scores_of_one(episode, each) for episode, each in zip(episodes, answer, strict=True)]


def _scores_of_one(episode: EpisodeResult, score: object) -> tuple[Score, ...]:
    try:
        own = as_score(score)
    except TypeError as error:
        text = f"score_group returned {score!r} for episode {episode.uid}, expected a number or a score"
        raise TypeError(text) from error
    if own.columns:
        raise ValueError(
            f"score_group returned columns for episode {episode.uid}: a reward fills them, no group reward"
        )
    numbers = range(len(episode.trajectories))
    last = max((number for number in numbers if episode.trained[number]), default=numbers[-1])
    values = token_scores(own, episode.trajectories[last])
    if not (np.isfinite(values).all() and np.isfinite(total_score(own))):
        raise ValueError(f"score_group returned {score!r} for episode {episode.uid}, which is not finite")
    return tuple(own if number == last else TrajectoryScore(value=0.0) for number in numbers)


def _can_score(episode: EpisodeResult) -> bool:
    return episode.status in _SCORED and bool(episode.trajectories)


def _failed(
    episode: EpisodeResult, size: int, owner: Owner, kind: str, message: str, frames: str = ""
) -> EpisodeResult:
    fault = Fault(owner=owner, kind=kind, message=message, traceback=frames)
    metrics = evolve(episode.metrics, extra={**episode.metrics.extra, GROUP_SIZE: float(size)})
    return evolve(episode, status=Status.FAILED, fault=fault, scores=(), metrics=metrics)


def _with_scores(episode: EpisodeResult, scores: tuple[Score, ...], size: int, seconds: float) -> EpisodeResult:
    extra = {**episode.metrics.extra, GROUP_SIZE: float(size)}
    if episode.reward is not None:
        extra[EPISODE_REWARD] = episode.reward
    metrics = evolve(episode.metrics, reward_s=episode.metrics.reward_s + seconds, extra=extra)
    return evolve(episode, scores=scores, metrics=metrics)


@define(eq=False)
class _CallGroups:
    """The groups of one call that have not been scored; everything happens on one event loop."""

    reward: GroupReward
    call: GroupCall
    _ended: dict[GroupKey, _Members] = field(factory=dict, init=False)
    _num_closed: Counter[GroupKey] = field(factory=Counter, init=False)
    _scoring: set[asyncio.Task[None]] = field(factory=set, init=False)

    def add(self, number: int, result: EpisodeResult) -> None:
        """Add an episode; the last one of its group starts the scoring."""
        key = group_key(result)
        self._ended.setdefault(key, []).append((number, result))
        if self._num_missing(key) <= 0:
            self._close(key)

    async def finish(self) -> None:
        """Close the groups that get no more members, and wait until all are delivered."""
        for key in tuple(self._ended):
            self._close(key)
        while self._scoring:
            await asyncio.wait(self._scoring)

    def give_up(self) -> None:
        """Deliver the waiting episodes without a score of their group: the runtime has failed, and the call ends."""
        for members in self._ended.values():
            self._hold(members)
        for task in self._scoring:
            task.cancel()

    def _num_missing(self, key: GroupKey) -> int:
        # A task may come several times in one call, and each time after the first group of it was scored.
        return self.call.num_members(key) - self._num_closed[key] - len(self._ended[key])

    def _close(self, key: GroupKey) -> None:
        """Score a group if all of it has ended; a part of a group never has a score."""
        is_interrupted = self._num_missing(key) > 0
        members = self._ended.pop(key)
        self._num_closed[key] += len(members)
        if is_interrupted or any(result.unfinished is not None for _number, result in members):
            self._hold(members)
            return
        # In no task group, which would change the exceptions of the call; `finish` waits for it.
        task = asyncio.get_running_loop().create_task(self._score(members))
        self._scoring.add(task)
        task.add_done_callback(self._scoring.discard)

    async def _score(self, members: _Members) -> None:
        try:
            results = await self.reward.score_members([result for _number, result in members], self.call)
        except BaseException:  # no result is lost, whatever ends the scoring
            self._hold(members)
            raise
        for (number, _result), result in zip(members, results, strict=True):
            self.call.put(number, result)

    def _hold(self, members: _Members) -> None:
        for number, result in members:
            if result.unfinished is None:
                self.call.hold(number, result)
            else:
                self.call.put(number, result)
