"""The way of events from a worker's process to the driver: what is kept, when it is due, and on whose clock."""

import asyncio
import time

import pytest

from turnwise.observer import LimitReached, RewardFinished, unix_s
from turnwise.runtime.relay import Relay, clock_offset_s, shifted
from turnwise.telemetry import Observers


def test_only_what_the_driver_hears_is_kept():
    """
    Events that were asked for are kept in order until they are taken; the driver's own are never among them.
    """

    async def main():
        due = asyncio.Event()
        relay = Relay(due.set)
        names = frozenset({"on_limit_reached", "on_run_started", "on_episode_finished"})
        observers = Observers.of([relay.observer_of(names)])
        assert observers.names() == {"on_limit_reached"}
        for limit in ("a", "b"):
            observers.emit("on_limit_reached", LimitReached(limit=limit))
        async with asyncio.timeout(10):
            await due.wait()
        assert [(name, event.limit) for name, event in relay.take()] == [
            ("on_limit_reached", "a"),
            ("on_limit_reached", "b"),
        ]
        assert relay.take() == []

    asyncio.run(main())


@pytest.mark.parametrize(("ahead_s", "expected"), [(0.0, 0.0), (5.0, -5.0), (-3600.0, 3600.0)])
def test_clock_offset(ahead_s, expected):
    """
    Another machine's clock is found up to the time of an answer; processes of one machine need no correction.
    """

    async def read():
        await asyncio.sleep(0.001)
        return unix_s(time.perf_counter()) + ahead_s

    assert asyncio.run(clock_offset_s(read)) == pytest.approx(expected, abs=0.5)


def test_shifted():
    """
    Only an event with a time is moved, and only when there is something to move.
    """
    event = RewardFinished(uid="a", reward=1.0, seconds=0.1, started_at=100.0)
    assert shifted(event, 0.0) is event
    assert shifted(event, -5.0).started_at == 95.0
    timeless = LimitReached(limit="x")
    assert shifted(timeless, 1.0) is timeless
