"""An object that all users of an event loop share, from the first one to the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from attrs import define, field

T = TypeVar("T")


@define(eq=False)
class _Slot(Generic[T]):
    """The object of one event loop, while it is open; `parts` closes it."""

    lock: asyncio.Lock = field(factory=asyncio.Lock)
    opened: T | None = None
    num_users: int = 0
    parts: AsyncExitStack = field(factory=AsyncExitStack)


@define(eq=False)
class PerLoop(Generic[T]):
    """
    Opens an object for the first user in an event loop, and closes it after the last.

    Workers have an event loop each, and a server belongs to the loop that it was started on.

    Attributes:
        open: returns a context manager whose value is the object.
    """

    open: Callable[[], AbstractAsyncContextManager[T]]
    _slots: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slot[T]] = field(factory=WeakKeyDictionary, init=False)

    @property
    def num_open(self) -> int:
        """The number of event loops whose object is open."""
        return sum(slot.opened is not None for slot in self._slots.values())

    @asynccontextmanager
    async def use(self) -> AsyncIterator[T]:
        """Keep the object of the running event loop open inside the `async with` statement."""
        slot = self._slots.setdefault(asyncio.get_running_loop(), _Slot())
        slot.num_users += 1
        try:
            async with slot.lock:  # the first user opens it, and the others wait
                if slot.opened is None:
                    slot.opened = await slot.parts.enter_async_context(self.open())
            yield slot.opened
        finally:
            slot.num_users -= 1
            async with slot.lock:
                if slot.num_users == 0 and slot.opened is not None:  # else a new user came in between
                    slot.opened = None
                    await slot.parts.aclose()
