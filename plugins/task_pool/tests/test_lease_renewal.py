"""Calls of an agent renew its lease, at the time of a loop that the tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise_task_pool.workers.lease_renewal import LeaseRenewal

LEASE_S = 8.0


@define(eq=False)
class Held:
    """A lease and the time; a renewal of a lease whose time is over fails."""

    now: float = 0.0
    until: float = LEASE_S
    renewals: list[float] = field(factory=list)
    is_lost: bool = False

    def lose(self) -> None:
        self.is_lost = True

    async def renew(self) -> bool:
        self.renewals.append(self.now)
        if self.now >= self.until:
            return False
        self.until = self.now + LEASE_S
        return True

    async def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for _ in range(5):
                await asyncio.sleep(0)


def run(work: Callable[[Held, LeaseRenewal], Awaitable[None]]) -> None:
    async def main() -> None:
        held = Held()
        asyncio.get_running_loop().time = lambda: held.now
        await work(held, LeaseRenewal(held.renew, LEASE_S, held.lose))

    asyncio.run(main())


@given(durations=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=6))
def test_calls_keep_a_lease(durations: list[tuple[int, int]]) -> None:
    """However long they take; between calls and after the last one it lasts at least three quarters of its time."""

    async def work(held: Held, renewal: LeaseRenewal) -> None:
        for duration, pause in durations:
            async with renewal.hold():
                assert not held.is_lost
                await held.pass_time(duration)
            assert held.until - held.now >= LEASE_S * 3 / 4
            await held.pass_time(pause)
        assert held.now < held.until

    run(work)


def test_calls_that_overlap_keep_a_lease() -> None:
    """Until the last of them has ended; then nothing renews it."""

    async def work(held: Held, renewal: LeaseRenewal) -> None:
        async with renewal.hold():
            async with renewal.hold():
                await held.pass_time(20)
            await held.pass_time(20)
        num_renewals = len(held.renewals)
        await held.pass_time(20)
        assert len(held.renewals) == num_renewals
        async with renewal.hold():
            assert held.is_lost

    run(work)


def test_calls_in_quick_succession_write_seldom() -> None:
    """Calls of one moment renew the lease at most once."""

    async def work(held: Held, renewal: LeaseRenewal) -> None:
        for _ in range(100):
            async with renewal.hold():
                pass
        assert held.renewals == [0.0]

    run(work)


def test_a_lost_lease_ends_its_session() -> None:
    """The call that finds it out is told so before it does anything."""

    async def work(held: Held, renewal: LeaseRenewal) -> None:
        held.now = held.until
        async with renewal.hold():
            assert held.is_lost

    run(work)
