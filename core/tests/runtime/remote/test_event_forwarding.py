"""Forwarding of events from a worker's process to the driver: selection, delay and clocks."""

import asyncio
import time

import pytest

from turnwise.events.dispatch import Observers
from turnwise.events.observer import LimitReached, RewardFinished, unix_s
from turnwise.runtime.remote.event_forwarding import EventForwarder, measure_clock_offset_s, shift_event


def test_only_events_of_the_drivers_observers_are_collected():
    """Requested events are kept in order until they are drained; events that the driver emits itself are not kept."""

    async def main():
        due = asyncio.Event()
        forwarder = EventForwarder(due.set)
        names = frozenset({"on_limit_reached", "on_run_started", "on_episode_finished"})
        observers = Observers.of([forwarder.make_observer(names)])
        assert observers.names() == {"on_limit_reached"}
        for limit in ("a", "b"):
            observers.emit("on_limit_reached", LimitReached(limit=limit))
        async with asyncio.timeout(10):
            await due.wait()
        assert [(name, event.limit) for name, event in forwarder.drain()] == [
            ("on_limit_reached", "a"),
            ("on_limit_reached", "b"),
        ]
        assert forwarder.drain() == []

    asyncio.run(main())


@pytest.mark.parametrize(("ahead_s", "expected"), [(0.0, 0.0), (5.0, -5.0), (-3600.0, 3600.0)])
def test_clock_offset(ahead_s, expected):
    """The offset is measured up to the duration of a reply, and equal clocks need no correction."""

    async def read_clock():
        await asyncio.sleep(0.001)
        return unix_s(time.perf_counter()) + ahead_s

    assert asyncio.run(measure_clock_offset_s(read_clock)) == pytest.approx(expected, abs=0.5)


def test_shift_event():
    """Only an event with a time changes, and only by an offset other than 0."""
    event = RewardFinished(uid="a", reward=1.0, seconds=0.1, started_at=100.0)
    assert shift_event(event, 0.0) is event
    assert shift_event(event, -5.0).started_at == 95.0
    without_time = LimitReached(limit="x")
    assert shift_event(without_time, 1.0) is without_time
