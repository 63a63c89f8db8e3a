"""When a message leaves: how what comes up close together travels together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class Coalescer:
    """
    Calls `send` once for all that came up within a short time.

    What comes up after a quiet time leaves with the present pass of the event loop. What follows it sooner than `gap_s`
    waits for the end of the gap and leaves together: Nagle's idea (RFC 896), on a clock in place of acknowledgements.
    So a message costs at most `gap_s` of delay, and a busy process handles few large ones.

    Attributes:
        send: sends everything there is.
        gap_s: shortest time between two messages; 0 for one in each pass.
    """

    send: Callable[[], None]
    gap_s: float = 0.0
    _leaving: asyncio.Handle | None = field(default=None, init=False)
    _left_at: float = field(default=-math.inf, init=False)

    def schedule(self) -> None:
        """Something has come up."""
        if self._leaving is None:
            loop = asyncio.get_running_loop()
            due = self._left_at + self.gap_s
            self._leaving = loop.call_soon(self.now) if due <= loop.time() else loop.call_at(due, self.now)

    def now(self) -> None:
        """Send at once, and nothing more when the gap ends."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._left_at = asyncio.get_running_loop().time()
        self.send()
