"""Admission of requests to an engine: many at once, or one that may kill the engine alone."""

from __future__ import annotations

import asyncio
from collections import deque

from attrs import define, field


@define(eq=False)
class _Waiting:
    """A request in the queue."""

    alone: bool
    admitted: asyncio.Future[None]


@define(eq=False)
class Admission:
    """Admits requests in the order of their arrival, at most `limit` at once."""

    limit: int
    _num_admitted: int = field(default=0, init=False)
    _is_alone: bool = field(default=False, init=False)
    _queue: deque[_Waiting] = field(factory=deque, init=False)

    @property
    def is_full(self) -> bool:
        """Whether the next request would have to wait."""
        return bool(self._queue) or self._is_alone or self._num_admitted >= self.limit

    async def enter(self, *, alone: bool = False) -> bool:
        """Wait for a slot and return whether the request is alone: a `pardon` lets it run beside others."""
        waiting = _Waiting(alone, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._admit()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting.admitted.cancelled():
                self._admit()
            else:
                self.leave()  # admitted and cancelled in one pass of the event loop
            raise
        return waiting.alone

    def leave(self) -> None:
        """Free the slot of a request."""
        self._num_admitted -= 1
        self._is_alone = False
        self._admit()

    def pardon(self) -> None:
        """Let requests that wait to run alone run beside others."""
        for waiting in self._queue:
            waiting.alone = False
        self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0].admitted.cancelled() or self._fits(self._queue[0])):
            waiting = self._queue.popleft()
            if not waiting.admitted.cancelled():
                self._num_admitted += 1
                self._is_alone = waiting.alone
                waiting.admitted.set_result(None)

    def _fits(self, waiting: _Waiting) -> bool:
        return not self._is_alone and self._num_admitted < (1 if waiting.alone else self.limit)
