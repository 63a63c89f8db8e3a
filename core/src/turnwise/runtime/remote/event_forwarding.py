"""
Forwarding of events from a worker's process to observers in the driver.

Events travel with the episodes that a worker delivers, so the driver emits an episode's events before its end. A worker
collects no events that no observer in the driver receives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from attrs import define, evolve, field

from turnwise.events.observer import Observer, unix_s

Events = list[tuple[str, object]]
"""Events with their names, such as `on_turn_finished`."""

DRIVER_EVENTS: Final = frozenset({"on_run_started", "on_episode_finished"})
"""Events that the driver emits itself."""

_MAX_DELAY_S: Final = 0.25
_NUM_CLOCK_READINGS: Final = 3


@define(eq=False)
class EventForwarder:
    """Collects the events of a worker; calls `flush` when they have waited long enough to travel without an episode."""

    flush: Callable[[], None]
    _events: Events = field(factory=list, init=False)

    def make_observer(self, names: frozenset[str]) -> Observer:
        """Return an observer that forwards exactly these events."""
        # A class with exactly these methods: emitters build only the events that some observer has a method for.
        methods = {name: _make_method(self._forward, name) for name in names - DRIVER_EVENTS}
        observer: Observer = type("ForwardingObserver", (Observer,), methods)()
        return observer

    def drain(self) -> Events:
        """Return and remove the collected events."""
        events, self._events = self._events, []
        return events

    def _forward(self, name: str, event: object) -> None:
        # The first event sets the timer. Later ones leave with it, or earlier with an episode.
        if not self._events:
            asyncio.get_running_loop().call_later(_MAX_DELAY_S, self.flush)
        self._events.append((name, event))


def _make_method(forward: Callable[[str, object], None], name: str) -> Callable[[Observer, object], None]:
    return lambda _self, event: forward(name, event)


async def measure_clock_offset_s(read_clock: Callable[[], Awaitable[float]]) -> float:
    """
    Return the seconds to add to Unix seconds of another process to convert them to this process's clock.

    The other clock is read between two readings of this one. The closest of several pairs counts (Cristian,
    "Probabilistic clock synchronization", 1989). An offset within the uncertainty is 0: processes of one machine share
    a clock.

    Args:
        read_clock: returns Unix seconds on the other process's clock.
    """
    best, uncertainty = 0.0, float("inf")
    for _ in range(_NUM_CLOCK_READINGS):
        before = unix_s(time.perf_counter())
        remote = await read_clock()
        after = unix_s(time.perf_counter())
        # A long round trip may have waited on either side, so only the shortest one counts.
        if after - before < uncertainty:
            best, uncertainty = (before + after) / 2 - remote, after - before
    return best if abs(best) > uncertainty / 2 else 0.0


def shift_event(event: Any, offset_s: float) -> object:
    """Return an event with its time converted to another clock; an event without a time is unchanged."""
    if not offset_s or not hasattr(event, "started_at"):
        return event
    return evolve(event, started_at=event.started_at + offset_s)
