"""Reads the bodies of a session: much new text in a thread, one after the other, so that other agents need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from attrs import define, field

from turnwise.threads import in_thread
from turnwise_gateway.dialects import Dialect, Exchange, RequestMemory, read_exchange
from turnwise_gateway.limits import MAX_COUNTED_BYTES, MAX_INLINE_BYTES, CallLimits
from turnwise_gateway.memory import run_and_give_back
from turnwise_gateway.server.routes import Route


@define(eq=False)
class BodyReader:
    """
    Reads the bodies of the calls of one session; see `turnwise_gateway.dialects`.

    Attributes:
        limits: of the bodies.
    """

    limits: CallLimits
    _memory: RequestMemory = field(init=False)
    _turn: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = RequestMemory(self.limits)

    async def read(self, route: Route, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """Return the call in a body; `CallRefusedError` if it has none, or more than the context can hold."""
        read = partial(
            read_exchange, route.dialect, body, headers, self._memory, is_question=route.question is not None
        )
        is_short = self._is_short(route.dialect, body)
        if is_short and self.limits.pictures is None:
            return read()  # a thread would cost more than the work
        async with self._turn:  # a session has one thread at most
            if is_short:  # but a picture of some kilobytes may be a large one
                return await in_thread(read, {})
            return await in_thread(run_and_give_back, {"work": read})

    def _is_short(self, dialect: Dialect, body: bytes) -> bool:
        """Return whether a body is short, or little of it is new, so that it is read in no more time."""
        if len(body) <= MAX_INLINE_BYTES:
            return True
        # The limit on values counts the whole body, which takes as long for a very large one.
        return len(body) <= MAX_COUNTED_BYTES and (self._memory.count_new_bytes(dialect.name, body) <= MAX_INLINE_BYTES)
