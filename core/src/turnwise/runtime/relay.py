"""
How events of a worker's process reach observers in the driver: which, when, and on whose clock.

Events travel with the episodes that a worker hands over, never by themselves, so that the driver hears an episode's
events before its end. Nothing is kept for events that nobody in the driver listens to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from attrs import define, evolve, field

from turnwise.observer import Observer, unix_s

Events = list[tuple[str, Any]]
"""Names of events, such as `on_turn_finished`, each with its event."""

OWN_TO_THE_DRIVER: Final = frozenset({"on_run_started", "on_episode_finished"})
"""Events that the driver emits by itself."""

_LONGEST_WAIT_S: Final = 0.25
_NUM_READINGS: Final = 3


@define(eq=False)
class Relay:
    """
    The worker's side: keeps events until they are collected.

    Attributes:
        due: called on the event loop when events have waited long enough to travel without an episode.
    """

    due: Callable[[], None]
    _events: Events = field(factory=list, init=False)

    def observer_of(self, names: frozenset[str]) -> Observer:
        """Return an observer that listens to exactly these events and keeps them."""
        methods = {name: _hearing(self._hear, name) for name in names - OWN_TO_THE_DRIVER}
        observer: Observer = type("Relayed", (Observer,), methods)()
        return observer

    def take(self) -> Events:
        """Return what was kept, and keep it no longer."""
        taken, self._events = self._events, []
        return taken

    def _hear(self, name: str, event: object) -> None:
        if not self._events:
            asyncio.get_running_loop().call_later(_LONGEST_WAIT_S, self.due)
        self._events.append((name, event))


def _hearing(hear: Callable[[str, object], None], name: str) -> Callable[[Observer, object], None]:
    return lambda _self, event: hear(name, event)


async def clock_offset_s(read_clock: Callable[[], Awaitable[float]]) -> float:
    """
    Return the seconds to add to Unix seconds of another process to have them on this process's clock.

    The other clock is read between two readings of this one, a few times, and the closest pair counts (Cristian,
    "Probabilistic clock synchronization", 1989). What lies within the uncertainty of that is 0: processes of one
    machine share a clock.
    """
    best, uncertainty = 0.0, float("inf")
    for _ in range(_NUM_READINGS):
        before = unix_s(time.perf_counter())
        theirs = await read_clock()
        after = unix_s(time.perf_counter())
        if after - before < uncertainty:
            best, uncertainty = (before + after) / 2 - theirs, after - before
    return best if abs(best) > uncertainty / 2 else 0.0


def shifted(event: Any, offset_s: float) -> Any:
    """Return an event with its time on another clock; one without a time as it is."""
    if not offset_s or not hasattr(event, "started_at"):
        return event
    return evolve(event, started_at=event.started_at + offset_s)
