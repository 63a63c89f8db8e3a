"""The number of programs that a process may run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from attrs import define, field

from turnwise.descriptors import count_fitting, raise_descriptor_limit


@define(eq=False)
class ProgramPlaces:
    """Lets as many programs run at once as the process has descriptors for; without descriptors they would fail."""

    _limit: int = field(factory=raise_descriptor_limit)
    _places: asyncio.Semaphore = field(init=False)
    _has_warned: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._places = asyncio.Semaphore(count_fitting(self._limit))

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a place for a program inside the `async with` statement."""
        if self._places.locked() and not self._has_warned:
            self._has_warned = True
            structlog.get_logger().warning(
                "programs of agents wait for each other: raise `ulimit -Hn`, or lower rollout.max_in_flight",
                open_files=self._limit,
                programs_at_once=count_fitting(self._limit),
            )
        async with self._places:
            yield
