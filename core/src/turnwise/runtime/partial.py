"""
One call's end before its last episode: when enough have finished, the stragglers are cut and kept for another call.

It also puts the episodes of a call in order, so that those of a group stand together whichever call began them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TypedDict

from attrs import define, field, frozen, validators

from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.result import EpisodeResult
from turnwise.runtime.worker import Deliver
from turnwise.types import Status


class Partial(TypedDict, total=False):
    """
    When a call ends before its last episode, and what it goes on with.

    Attributes:
        min_fraction: of the episodes that must finish, in (0, 1]; 1 waits for all.
        grace_s: seconds that the others then still get before they are cut.
        resume: unfinished episodes to go on with, before the new tasks; true takes all of `RolloutManager.unfinished`.
    """

    min_fraction: float
    grace_s: float
    resume: bool | Iterable[UnfinishedEpisode]


@frozen(kw_only=True)
class Enough:
    """
    How much of a call is enough.

    Attributes:
        min_fraction: of the episodes that must finish, in (0, 1].
        grace_s: seconds that the others then still get.
    """

    min_fraction: float = field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    grace_s: float = field(default=0.0, validator=validators.ge(0))

    def of(self, num_episodes: int) -> int:
        """Return how many must finish; a product such as 0.7 * 10 is not rounded up for its last bit."""
        return math.ceil(self.min_fraction * num_episodes - 1e-9)


@define(eq=False)
class PartialCall:
    """
    One call on the runtime's loop.

    Attributes:
        num_episodes: that it asked for.
        enough: when it may end.
        put: takes what the caller gets.
        keep: takes what is left of a straggler.
        cut: set when the stragglers are to end.
    """

    num_episodes: int
    enough: Enough
    put: Deliver
    keep: Callable[[UnfinishedEpisode], None]
    cut: asyncio.Event = field(factory=asyncio.Event)
    _num_finished: int = 0

    def deliver(self, number: int, result: EpisodeResult) -> None:
        """Take a result from the runtime: give it to the caller, or keep what a cut left of it."""
        if self.cut.is_set() and result.unfinished is not None:
            self.keep(result.unfinished)
            return
        self.put(number, result)
        self._num_finished += result.status is not Status.ABORTED
        if self._num_finished == self.enough.of(self.num_episodes) < self.num_episodes:
            asyncio.get_running_loop().call_later(self.enough.grace_s, self.cut.set)


def grouped(specs: Iterable[EpisodeSpec]) -> list[EpisodeSpec]:
    """Return specs with the episodes of each group together, groups in order of appearance."""
    groups: dict[tuple[str, int, bool], list[EpisodeSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.task.uid, spec.global_step, spec.validation), []).append(spec)
    return [spec for group in groups.values() for spec in group]
