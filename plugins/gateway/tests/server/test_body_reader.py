"""The thread in which a body is read."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.dialects.request_body import RequestBody
from turnwise_gateway.limits import MAX_COUNTED_BYTES, MAX_INLINE_BYTES, CallLimits
from turnwise_gateway.server.body_reader import BodyReader
from turnwise_gateway.server.routes import Route

LIMITS = CallLimits.of_context(1 << 17)


@pytest.fixture
def threads(monkeypatch):
    """Whether each body was read in the thread of the event loop."""
    found, read, here = [], RequestBody.read.__func__, threading.get_ident()

    def note(cls, *arguments):
        found.append(threading.get_ident() == here)
        return read(cls, *arguments)

    monkeypatch.setattr(RequestBody, "read", classmethod(note))
    return found


@pytest.mark.parametrize(
    ("first", "added", "expected"),
    [
        (MAX_INLINE_BYTES // 2, 9, [True, True]),
        (2 * MAX_INLINE_BYTES, 9, [False, True]),
        (2 * MAX_INLINE_BYTES, MAX_INLINE_BYTES, [False, False]),
        (MAX_COUNTED_BYTES, 9, [False, False]),
    ],
)
def test_only_much_new_text_is_read_in_a_thread(threads, first, added, expected):
    """A long body that continues another one is little work, unless to count its values takes time."""
    reader = BodyReader(LIMITS)

    async def read(*lengths):
        items = [{"role": "user", "content": "x" * length} for length in lengths]
        body = json.dumps({"messages": items}).encode()
        await reader.read(Route("call", DIALECTS[0], None), body, {})

    async def scenario():
        await read(first)
        await read(first, added)

    asyncio.run(scenario())

    assert expected == threads
