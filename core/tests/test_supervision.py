"""Seats and their supervisor: starts are tried again, losses replaced, and what has no hope is given up at once."""

import asyncio

import pytest
from attrs import define, field

from turnwise.errors import ConfigError, EngineError
from turnwise.runtime.supervision import Patience, PlacementError, Supervisor, reason_of, seats_of, settled


@define
class FakeKeeper:
    """Starts fail as told, and each actor lives until the next of `lives` says why it ends."""

    start_errors: list = field(factory=list)
    lives: list = field(factory=list)
    seats: list = field(factory=lambda: seats_of("replica", 1))
    told: list = field(factory=list)

    async def start(self, seat):
        self.told.append("start")
        if self.start_errors:
            raise self.start_errors.pop(0)
        seat.handle = object()
        return "watch"

    async def attend(self, seat, watch):
        assert watch == "watch"
        if not self.lives:
            await asyncio.Event().wait()
        raise self.lives.pop(0)

    def vacate(self, seat):
        seat.handle = None

    def give_up(self, seat):
        self.told.append("given up")

    async def close(self):
        pass


def keep(keeper, *, until="settled", **patience):
    """Keep a keeper's seat until it has settled, or has been given up, and return the seat."""

    async def run():
        supervisor = Supervisor(Patience(**{"backoff_s": 0.001, **patience}))
        keeping = asyncio.ensure_future(supervisor.keep(keeper, keeper.seats[0]))
        if until == "settled":
            await settled(keeper.seats)
            await asyncio.sleep(0.05)
        else:
            await keeping
        keeping.cancel()
        await asyncio.wait([keeping])
        return keeper.seats[0]

    return asyncio.run(run())


def test_a_start_that_fails_is_tried_again():
    """
    A port that is taken twice and then free costs two tries and no restart.
    """
    keeper = FakeKeeper(start_errors=[OSError("port 5000 is taken"), OSError("port 5000 is taken")])

    seat = keep(keeper, max_starts=3)

    assert (["start"] * 3, 0, 0) == (keeper.told, seat.failed_starts, seat.restarts)


def test_a_start_that_always_fails_names_the_reason_in_one_line():
    """
    The error has the last reason, and how often it was tried.
    """
    errors = [EngineError("the port\n5000 is taken"), EngineError("no"), OSError("device 3 is busy\nfor long")]
    keeper = FakeKeeper(start_errors=errors)

    with pytest.raises(EngineError, match=r"^replica 0 could not be started: OSError: device 3 is busy \(3 tries\)$"):
        keep(keeper, max_starts=3)
    assert ["start", "start", "start", "given up"] == keeper.told


@pytest.mark.parametrize("error", [ConfigError("too few devices"), PlacementError("no room")])
def test_what_cannot_get_better_is_not_tried_again(error):
    """
    A bad config, and devices that did not become free, end it at once.
    """
    keeper = FakeKeeper(start_errors=[error])

    with pytest.raises(EngineError, match=r"replica 0 could not be started: \w+: (too few devices|no room)$"):
        keep(keeper, max_starts=5)
    assert ["start", "given up"] == keeper.told


def test_what_dies_again_and_again_is_given_up():
    """
    Restarts are bounded, apart from failed starts.
    """
    keeper = FakeKeeper(lives=[EngineError("died")] * 9)

    seat = keep(keeper, until="given up", max_restarts=2)

    assert (["start"] * 3 + ["given up"], 2) == (keeper.told, seat.restarts)
    assert "EngineError: died" == seat.lost


def test_what_ran_for_long_has_its_restarts_forgiven():
    """
    A long run outlives any number of losses that lie far enough apart.
    """
    keeper = FakeKeeper(lives=[EngineError("died")] * 9)

    seat = keep(keeper, max_restarts=1, healthy_s=0.0, backoff_s=0.0)

    assert (10, 1) == (seat.num_starts, seat.restarts)
    assert not seat.given_up


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
    """
    Out of groups, and out of the traceback of a constructor that Ray puts into a text, comes the line that matters.
    """
    assert reason == reason_of(error)
