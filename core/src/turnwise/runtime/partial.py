"""Partial rollouts: a call ends when enough episodes have finished, and the others continue in a later call."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypedDict

from attrs import define, evolve, field, frozen, validators

from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.worker import Deliver, build_unstarted_result
from turnwise.types import Status

_PARTIAL: Final = ("min_fraction", "grace_s", "resume")


class RolloutOptions(TypedDict, total=False):
    """
    Options of a call; the last three end it early or continue an earlier one.

    Attributes:
        global_step: training step of the request; 0 unless given.
        validation: sample with the validation parameters; False unless given.
        min_fraction: fraction of the episodes that must finish, in (0, 1]; 1 waits for all.
        grace_s: seconds that the other episodes get after that, before they are interrupted.
        resume: episodes to continue before the new tasks; True continues all of `RolloutManager.unfinished`.
    """

    global_step: int
    validation: bool
    min_fraction: float
    grace_s: float
    resume: bool | Iterable[UnfinishedEpisode]


@frozen(kw_only=True)
class CompletionThreshold:
    """When a call may end; see `RolloutOptions`."""

    min_fraction: float = field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    grace_s: float = field(default=0.0, validator=validators.ge(0))

    @classmethod
    def from_options(cls, options: RolloutOptions) -> CompletionThreshold:
        """Return the threshold of a call; `TypeError` for an unknown option, which keyword arguments let through."""
        if unknown := sorted(options.keys() - RolloutOptions.__annotations__.keys()):
            raise TypeError(
                f"unknown option {unknown[0]!r}; the options of a partial rollout are {', '.join(_PARTIAL)}"
            )
        return cls(min_fraction=options.get("min_fraction", 1.0), grace_s=options.get("grace_s", 0.0))

    def count(self, num_episodes: int) -> int:
        """Return the number of episodes that must finish."""
        # 0.7 * 10 is 7.000000000000001 in floating point, and must not be rounded up to 8.
        return math.ceil(self.min_fraction * num_episodes - 1e-9)


@define(eq=False)
class UnfinishedEpisodes:
    """Episodes that wait for a call that continues them, in the order of their interrupts. Safe in all threads."""

    _episodes: list[UnfinishedEpisode] = field(factory=list, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def all(self) -> tuple[UnfinishedEpisode, ...]:
        with self._lock:
            return tuple(self._episodes)

    def add(self, episode: UnfinishedEpisode) -> None:
        with self._lock:
            self._episodes.append(episode)

    def forget(self, episodes: Iterable[UnfinishedEpisode]) -> list[UnfinishedEpisode]:
        """Remove some episodes, and return the removed ones; unknown ones are ignored."""
        ids = set(map(id, episodes))
        with self._lock:
            removed = [each for each in self._episodes if id(each) in ids]
            self._episodes[:] = [each for each in self._episodes if id(each) not in ids]
        return removed

    @contextmanager
    def taken(self, resume: bool | Iterable[UnfinishedEpisode]) -> Iterator[tuple[UnfinishedEpisode, ...]]:
        """
        Take all episodes, or given ones, for a call. Given ones may come from elsewhere, such as a file.

        They are taken before the call is checked, because another call may start meanwhile; after an error in the body
        they are here again. An episode that two calls name runs twice.
        """
        if isinstance(resume, bool):
            with self._lock:
                episodes = tuple(self._episodes) if resume else ()
                self._episodes = self._episodes[len(episodes) :]
            removed = list(episodes)
        else:
            episodes = tuple(resume)
            removed = self.forget(episodes)
        try:
            yield episodes
        except BaseException:
            with self._lock:
                self._episodes[:0] = removed
            raise


@define(eq=False)
class RolloutCall:
    """
    One call, on the event loop of the runtime.

    Attributes:
        num_episodes: of the call; 0 while it is open, so that no threshold ends it.
        put: called with each result for the caller.
        keep: called with each interrupted episode.
        interrupt: set when the remaining episodes must end.
    """

    feed: EpisodeFeed
    num_episodes: int
    threshold: CompletionThreshold
    put: Deliver
    keep: Callable[[UnfinishedEpisode], None]
    interrupt: asyncio.Event = field(factory=asyncio.Event)
    _num_finished: int = 0

    def add(self, specs: Sequence[EpisodeSpec]) -> None:
        """Add episodes; after an abort they end at once."""
        self.feed.add(specs)
        if self.feed.closed:
            self.end()

    def end(self) -> None:
        """Close the feed, and deliver the episodes that no worker has taken from it."""
        self.feed.close()
        for number, spec in iter(self.feed.take_waiting, None):
            self.deliver(number, build_unstarted_result(spec))

    def abandon(self) -> None:
        """End the call, and drop its episodes, which have no reader."""
        self.put, self.keep = (lambda _number, _result: None), (lambda _unfinished: None)
        self.end()
        self.interrupt.set()

    def deliver(self, number: int, result: EpisodeResult) -> None:
        """Handle a result: give it to the caller, or keep it if the threshold interrupted it."""
        result = self._with_group_size(result)
        if self.interrupt.is_set() and result.unfinished is not None:
            self.keep(result.unfinished)
            return
        self.put(number, result)
        self._num_finished += result.status is not Status.ABORTED
        # Equality, so that the timer starts once. A threshold that needs all episodes never interrupts: an aborted one
        # counts as unfinished, and the call ends by itself.
        if self._num_finished == self.threshold.count(self.num_episodes) < self.num_episodes:
            asyncio.get_running_loop().call_later(self.threshold.grace_s, self.interrupt.set)

    def _with_group_size(self, result: EpisodeResult) -> EpisodeResult:
        """Return the result with the size of its group in the unfinished episode, which may be resumed alone."""
        if result.unfinished is None:
            return result
        spec = result.unfinished.spec
        spec = evolve(spec, num_members=self.feed.num_members[spec.group])
        return evolve(result, unfinished=evolve(result.unfinished, spec=spec))
