"""A client that leaves while its lease is renewed: the session must not wait for it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from session_scenarios import Sessions, make_call, user


def test_an_answer_is_released_when_its_client_leaves_during_the_renewal() -> None:
    """The turn goes to the next equal request, and the session is idle."""
    renewing = asyncio.Event()
    is_slow = True

    @asynccontextmanager
    async def renew() -> AsyncIterator[None]:
        yield
        if is_slow:
            renewing.set()
            await asyncio.Event().wait()

    async def agent(session: Any) -> None:
        nonlocal is_slow
        session.door.hold = renew
        call = make_call(user("Question 0?"))
        leaving = asyncio.ensure_future(session.answer(call))
        await renewing.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert session.is_idle
        is_slow = False
        (await session.answer(call)).confirm()

    done = Sessions(turns=("Yes.",)).run(agent)

    assert 1 == done.counts["redelivered"]
    assert 1 == len(done.records[0].turns())
