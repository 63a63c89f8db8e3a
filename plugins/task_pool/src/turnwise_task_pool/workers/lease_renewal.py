"""Renews the lease of a session while its agent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

from attrs import define, field


@define(eq=False)
class LeaseRenewal:
    """
    Renews a lease for the calls of its agent: at the start, and at the end and during a long call.

    Attributes:
        renew: renews it for `lease_s` from now; returns False for a lease that has ended.
        lease_s: seconds that a lease lasts.
        lose: called when the lease has ended; it ends the session.
    """

    renew: Callable[[], Awaitable[bool]]
    lease_s: float
    lose: Callable[[], None]
    _renewed: float = field(default=-inf, init=False)
    _num_calls: int = field(default=0, init=False)
    _keeping: asyncio.Task[None] | None = field(default=None, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep the lease inside the `async with` statement, for a call of the model or of a tool."""
        self._num_calls += 1
        try:
            await self._touch()
            self._arm()
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._disarm()
            await self._touch()

    async def _touch(self) -> None:
        # A renewal for each call would be most of the pool's writes; the lease may be shorter by a quarter instead.
        now = asyncio.get_running_loop().time()
        if now - self._renewed < self.lease_s / 4:
            return
        if await self.renew():
            self._renewed = now
        else:
            self.lose()

    def _arm(self) -> None:
        """Look at the lease twice between the time of its renewal and its end, while a call is in flight."""
        if self._timer is None and self._num_calls:
            self._timer = asyncio.get_running_loop().call_later(self.lease_s / 8, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        try:
            await self._touch()
        finally:
            self._arm()
