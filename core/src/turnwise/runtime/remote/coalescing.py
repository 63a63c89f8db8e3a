"""Coalescing of messages: several that are due within a short time become one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class Coalescer:
    """
    Calls `send` once for everything that was scheduled within a short time.

    After a quiet time `send` is called in the current pass of the event loop. Sooner than `gap_s` after the last call,
    it waits until the gap has ended. This is Nagle's algorithm (RFC 896) with a clock in place of acknowledgements: a
    message waits for at most `gap_s`, and a busy process sends few large messages.
    """

    send: Callable[[], None]
    gap_s: float = 0.0
    _timer: asyncio.Handle | None = field(default=None, init=False)
    _sent_at: float = field(default=-math.inf, init=False)

    def schedule(self) -> None:
        """Call `send` soon: something is ready."""
        # One timer for everything that becomes ready until it fires.
        if self._timer is None:
            loop = asyncio.get_running_loop()
            due = self._sent_at + self.gap_s
            self._timer = loop.call_soon(self.flush) if due <= loop.time() else loop.call_at(due, self.flush)

    def flush(self) -> None:
        """Call `send` now, and not again for anything that was scheduled before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Both before `send`, so that a message which it schedules starts a new gap.
        self._sent_at = asyncio.get_running_loop().time()
        self.send()
