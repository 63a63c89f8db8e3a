"""An object of an event loop is opened once, shared, closed after its last user, and opened again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.per_loop import PerLoop


class Ward:
    """Opens numbers, and notes the order of events; the first `num_failing` openings fail."""

    def __init__(self, num_failing=0):
        self.events, self.num_failing, self.count = [], num_failing, 0

    @asynccontextmanager
    async def open(self):
        await asyncio.sleep(0)
        if self.num_failing:
            self.num_failing -= 1
            raise OSError("the address is taken")
        self.count += 1
        number = self.count
        self.events.append(f"open {number}")
        try:
            yield number
        finally:
            await asyncio.sleep(0)
            self.events.append(f"close {number}")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8))
def test_users_share_one_that_is_open(users):
    """Whenever users come and leave, each has the one that is open, and each that was opened is closed."""
    ward = Ward()
    shared = PerLoop(ward.open)

    async def use(arrives, stays):
        for _ in range(arrives):
            await asyncio.sleep(0)
        async with shared.use() as number:
            for _ in range(stays):
                assert f"close {number}" not in ward.events
                assert ward.events[-1] == f"open {number}"
                await asyncio.sleep(0)

    async def run():
        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(use(*user))

    asyncio.run(run())
    assert ward.events == [f"{what} {number + 1}" for number in range(ward.count) for what in ("open", "close")]


def test_a_failed_opening_is_tried_by_the_next_user():
    """The error reaches the user who tried, and the next user opens it."""
    ward = Ward(num_failing=1)
    shared = PerLoop(ward.open)

    async def run():
        with pytest.raises(OSError, match="taken"):
            async with shared.use():
                raise AssertionError
        async with shared.use() as number:
            return number

    assert asyncio.run(run()) == 1
    assert ward.events == ["open 1", "close 1"]


def test_event_loops_have_their_own():
    """A second event loop opens another object, also while the first one is open."""
    ward = Ward()
    shared = PerLoop(ward.open)

    async def inner():
        async with shared.use() as number:
            return number

    async def outer():
        async with shared.use() as number:
            other = await asyncio.to_thread(lambda: asyncio.run(inner()))
            return number, other

    assert asyncio.run(outer()) == (1, 2)
    assert ward.events == ["open 1", "open 2", "close 2", "close 1"]


def test_an_error_of_a_user_closes_it():
    """The object is closed when its only user fails, and the error is the user's."""
    ward = Ward()

    async def run():
        async with PerLoop(ward.open).use():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(run())
    assert ward.events == ["open 1", "close 1"]
