"""
The reward client of a worker: sends finished episodes to reward workers and receives their scores.

It chooses the reward worker with the fewest pending scores, and retries if a reward worker dies or its service fails.
It does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from turnwise.errors import EngineError, InfrastructureError, TurnwiseError
from turnwise.protocols import Episode
from turnwise.record.result import EpisodeResult
from turnwise.report import Report
from turnwise.runtime.remote.episode_snapshot import EpisodeSnapshot
from turnwise.runtime.remote.result_wire import pack_episodes
from turnwise.runtime.remote.supervision import failure_reason
from turnwise.runtime.worker import WorkerComponents

FailureOwner = Literal["reward", "engine", "infra"]
_BASES: dict[FailureOwner, type[TurnwiseError]] = {"engine": EngineError, "infra": InfrastructureError}


@frozen(kw_only=True)
class RewardFailure:
    """An error of a reward as plain data: its class may not exist in the other process, or may not pickle."""

    kind: str
    text: str
    frames: str
    owner: FailureOwner = "reward"

    @classmethod
    def of(cls, error: BaseException) -> RewardFailure:
        owner: FailureOwner = next((owner for owner, base in _BASES.items() if isinstance(error, base)), "reward")
        frames = "".join(traceback.format_exception(error))
        return cls(kind=type(error).__name__, text=str(error), frames=frames, owner=owner)

    def as_error(self) -> Exception:
        """Return an error with this class name and text, and the traceback as a note."""
        # A class with this name, because the name becomes the kind of the fault; the base decides about its owner.
        error: Exception = type(self.kind, (_BASES.get(self.owner, TurnwiseError),), {})(self.text)
        error.add_note(f"in a reward worker:\n{self.frames}")
        return error


@frozen(kw_only=True)
class RewardReply:
    """The reply of a reward worker: scores of the reward, metrics and reports that it added, and its error."""

    scores: Any = None
    recorded: tuple[tuple[str, float], ...] = ()
    reports: tuple[Report, ...] = ()
    failure: RewardFailure | None = None


ScoreRemotely = Callable[[Any, float], Awaitable[RewardReply]]
"""Scores an episode, or a group, in a reward worker within seconds; raises an error if the worker dies."""


class RewardWorkerDiedError(InfrastructureError):
    """A reward worker died; this episode, or another one that it scored at the time, may be the cause."""


@define(eq=False)
class _Link:
    """
    A worker's state about one reward worker.

    `suspects` is a lock of the episodes whose last reward worker died. A reward worker scores one of them at a time, so
    that a harmful one does not fail the others with it again and again.
    """

    score: ScoreRemotely
    num_pending: int = 0
    suspects: asyncio.Lock = field(factory=asyncio.Lock)


@define(eq=False)
class RewardPool:
    """
    The reward of a worker whose episodes are scored by reward workers.

    Attributes:
        max_tries: attempts to score one episode, if reward workers die or their services fail.
        backoff_s: seconds before the second attempt; doubles each time.
        reward_s: deadline of one score in seconds, from its start in the reward worker.
    """

    max_tries: int = 3
    backoff_s: float = 0.5
    reward_s: float = field(default=60.0, init=False)
    num_retried: int = field(default=0, init=False)
    _links: dict[int, _Link] = field(factory=dict, init=False)
    _any_live: asyncio.Event = field(factory=asyncio.Event, init=False)
    _given_up: str = field(default="", init=False)

    def attach(self, components: WorkerComponents) -> WorkerComponents:
        """Return components whose rewards are scored here, with the deadline moved to the reward worker."""
        # Only the reward worker knows when a score starts: waiting for it must not count towards the deadline.
        self.reward_s = components.limits.reward_s
        return evolve(components.scored_by(self), limits=evolve(components.limits, reward_s=inf))

    async def score(self, episode: Episode) -> Any:
        """
        Score an episode in a reward worker; errors of the reward are raised here.

        Raises:
            InfrastructureError: in every attempt the reward worker died or its service failed, or none is left.
        """
        reply = await self._request(EpisodeSnapshot.of(episode))
        for name, value in reply.recorded:
            episode.record_metric(name, value)
        for report in reply.reports:
            episode.note_report(report)
        return _scores_of(reply)

    async def score_group(self, episodes: Sequence[EpisodeResult], seconds: float) -> Any:
        """Score a group in one reward worker, as `score` does an episode."""
        self.reward_s = seconds
        return _scores_of(await self._request(pack_episodes(list(enumerate(episodes)))))

    async def _request(self, work: object) -> RewardReply:
        suspect = False
        for attempt in range(1, self.max_tries + 1):
            try:
                reply = await self._score_once(work, suspect=suspect)
                break
            except InfrastructureError as error:
                # A failed service says nothing about the episode. A dead worker may have been killed by it.
                suspect = suspect or isinstance(error, RewardWorkerDiedError)
                if attempt == self.max_tries or self._given_up:
                    raise
                self.num_retried += 1
                await asyncio.sleep(self.backoff_s * 2.0 ** (attempt - 1))
        return reply

    def worker_up(self, index: int, score: ScoreRemotely) -> None:
        self._links[index] = _Link(score)
        self._any_live.set()

    def worker_down(self, index: int) -> None:
        self._links.pop(index, None)
        if not self._links and not self._given_up:
            self._any_live.clear()

    def give_up(self, reason: str) -> None:
        """Fail all scores at once: no reward worker will be restarted."""
        self._given_up = reason
        self._any_live.set()

    async def _score_once(self, work: object, *, suspect: bool) -> RewardReply:
        while True:
            await self._any_live.wait()
            if not self._links:
                raise InfrastructureError(f"every reward worker is dead, the last: {self._given_up}")
            index, link = min(self._links.items(), key=lambda pair: (pair[1].num_pending, pair[0]))
            async with link.suspects if suspect else nullcontext():
                # The reward worker may have died, and restarted, during the wait for the lock: then choose again.
                if self._links.get(index) is link:
                    return await self._score_on(index, link, work)

    async def _score_on(self, index: int, link: _Link, work: object) -> RewardReply:
        # Outside of the try: an error here means that the episode does not pickle, not that the worker died.
        scoring = link.score(work, self.reward_s)
        link.num_pending += 1
        try:
            reply = await scoring
        except Exception as error:
            # Other tasks may have removed this link already, and a restarted worker has a new one, which must stay.
            if self._links.get(index) is link:
                self.worker_down(index)
            raise RewardWorkerDiedError(f"reward worker {index} died: {failure_reason(error)}") from error
        finally:
            link.num_pending -= 1
        if reply.failure is not None and reply.failure.owner == "infra":
            raise reply.failure.as_error()
        return reply


def _scores_of(reply: RewardReply) -> Any:
    if reply.failure is not None:
        raise reply.failure.as_error()
    return reply.scores
