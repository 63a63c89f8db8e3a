"""The event queue of the simulators: model time, and events in its order."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from attrs import define, field

_Event = TypeVar("_Event")


@define(eq=False)
class EventQueue(Generic[_Event]):
    """
    Events in order of time; events of the same time in the order in which they were scheduled.

    Attributes:
        now: time of the last event, in seconds of model time.
    """

    now: float = 0.0
    _events: list[tuple[float, int, _Event]] = field(factory=list)
    _order: count[int] = field(factory=count)

    @property
    def next_at(self) -> float:
        """Time of the next event; infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def schedule(self, at_s: float, event: _Event) -> None:
        """Add an event; it must not be earlier than `now`."""
        heappush(self._events, (at_s, next(self._order), event))

    def pop(self) -> _Event:
        """Remove the next event, advance `now` to its time and return it."""
        self.now, _, event = heappop(self._events)
        return event
