"""Supervision: failed starts are retried, lost actors are replaced, and permanent failures are given up at once."""

import asyncio

import pytest
from attrs import define, field

from turnwise.errors import ConfigError, EngineError
from turnwise.runtime.remote.supervision import (
    PlacementError,
    RestartPolicy,
    Supervisor,
    failure_reason,
    make_slots,
    wait_until_started,
)


@define
class FakeGroup:
    """Raises `start_errors` in its starts; each actor ends with the next error of `deaths`."""

    start_errors: list = field(factory=list)
    deaths: list = field(factory=list)
    slots: list = field(factory=lambda: make_slots("replica", 1))
    calls: list = field(factory=list)

    async def start(self, slot):
        self.calls.append("start")
        if self.start_errors:
            raise self.start_errors.pop(0)
        slot.handle = object()
        return "watch"

    async def watch_actor(self, slot, watch):
        assert watch == "watch"
        if not self.deaths:
            await asyncio.Event().wait()
        raise self.deaths.pop(0)

    def release(self, slot):
        slot.handle = None

    async def give_up(self, slot):
        self.calls.append("given up")

    async def close(self):
        pass


def supervise(group, *, until="started", num_starts=1, **policy):
    """Supervise a group's slot until it has started so often, or has been given up, and return the slot."""

    async def run():
        supervisor = Supervisor(RestartPolicy(**{"backoff_s": 0.001, **policy}))
        supervising = asyncio.ensure_future(supervisor.supervise(group, group.slots[0]))
        if until == "started":
            await wait_until_started(group.slots)
            while group.slots[0].num_starts < num_starts:  # noqa: ASYNC110 - a slot has no event for a later start
                await asyncio.sleep(0)
        else:
            await supervising
        supervising.cancel()
        await asyncio.wait([supervising])
        return group.slots[0]

    return asyncio.run(run())


def test_a_failed_start_is_retried():
    """Two failed starts cost two attempts and no restart."""
    group = FakeGroup(start_errors=[OSError("port 5000 is taken"), OSError("port 5000 is taken")])

    slot = supervise(group, max_starts=3)

    assert (["start"] * 3, 0, 0) == (group.calls, slot.failed_starts, slot.restarts)


def test_the_error_of_the_last_attempt_is_one_line():
    """It has the last reason, and the number of attempts."""
    errors = [EngineError("the port\n5000 is taken"), EngineError("no"), OSError("device 3 is busy\nfor long")]
    group = FakeGroup(start_errors=errors)

    with pytest.raises(EngineError, match=r"^replica 0 could not be started: OSError: device 3 is busy \(3 tries\)$"):
        supervise(group, max_starts=3)
    assert ["start", "start", "start", "given up"] == group.calls


@pytest.mark.parametrize("error", [ConfigError("too few devices"), PlacementError("no room")])
def test_a_permanent_error_is_not_retried(error):
    """A wrong config, and devices that did not become free, end the attempts at once."""
    group = FakeGroup(start_errors=[error])

    text = r"replica 0 could not be started: (too few devices|PlacementError: no room)$"
    with pytest.raises(ConfigError if isinstance(error, ConfigError) else EngineError, match=text):
        supervise(group, max_starts=5)
    assert ["start", "given up"] == group.calls


def test_an_actor_that_dies_repeatedly_is_given_up():
    """Restarts have a limit, which failed starts do not count towards."""
    group = FakeGroup(deaths=[EngineError("died")] * 9)

    slot = supervise(group, until="given up", max_restarts=2)

    assert (["start"] * 3 + ["given up"], 2) == (group.calls, slot.restarts)
    assert "EngineError: died" == slot.last_error


def test_a_healthy_actor_has_its_restarts_reset():
    """A long run survives any number of losses that are far enough apart."""
    group = FakeGroup(deaths=[EngineError("died")] * 9)

    slot = supervise(group, num_starts=10, max_restarts=1, healthy_s=0.0, backoff_s=0.0)

    assert (10, 1) == (slot.num_starts, slot.restarts)
    assert not slot.given_up


CREATION = """The actor died because of an error raised in its creation task, \x1b[36mray::x:A\x1b[39m (pid=1)
  File "a.py", line 3, in __init__
    raise EngineError("no weights there")
turnwise.errors.EngineError: no weights there
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ExceptionGroup("many", [ExceptionGroup("more", [OSError("first\nsecond")])]), "OSError: first"),
        (RuntimeError(CREATION), "turnwise.errors.EngineError: no weights there"),
        (TimeoutError(), "TimeoutError: "),
    ],
)
def test_a_reason_is_one_line(error, reason):
    """The relevant line is found in exception groups, and in the traceback of a constructor inside Ray's text."""
    assert reason == failure_reason(error)
