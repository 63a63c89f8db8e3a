"""A client that leaves while its lease is renewed: the session must not wait for it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from session_scenarios import Sessions, make_call, user

from turnwise_gateway.pool.leased_session import LeasedSession
from turnwise_gateway.pool.store import Lease

LEASE = Lease(
    id="1-0-1", fence=1, attempt=1, worker="w", uid="t", global_step=0, rollout_n=0, content={}, until=float("inf")
)


def test_an_answer_is_released_when_its_client_leaves_during_the_renewal() -> None:
    """The turn goes to the next equal request, and the session is idle."""
    renewing = asyncio.Event()
    is_slow = True

    @asynccontextmanager
    async def call_of(_lease: Lease) -> AsyncIterator[None]:
        yield
        if is_slow:
            renewing.set()
            await asyncio.Event().wait()

    async def agent(session: Any) -> None:
        nonlocal is_slow
        leased = LeasedSession(LEASE, session, SimpleNamespace(call_of=call_of))
        call = make_call(user("Question 0?"))
        leaving = asyncio.ensure_future(leased.answer(call))
        await renewing.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert session.is_idle
        is_slow = False
        (await leased.answer(call)).confirm()

    done = Sessions(turns=("Yes.",)).run(agent)

    assert 1 == done.counts["redelivered"]
    assert 1 == len(done.records[0].turns())
