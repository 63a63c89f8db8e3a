"""
Seats and who keeps them taken: what dies is started again with back-off, until it is given up.

What sits there, how it starts and what its loss means to others is its keeper's affair. Nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Final, Protocol

import structlog
from attrs import define, field, frozen

from turnwise.errors import ConfigError, EngineError
from turnwise.observer import ActorRestarted
from turnwise.telemetry import Observers

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class PlacementError(EngineError):
    """What an actor needs is not there, or not free; trying again at once would not help."""


@define(eq=False)
class Seat:
    """
    The place of one actor; who sits there changes with every restart.

    Attributes:
        kind: what sits there, such as `replica`.
        index: which of its kind, from 0.
        handle: of the actor; None while nobody sits there.
        num_starts: how often a start was tried, in all: no two that sit there have the same number.
        restarts: how often in a row one that ran was lost.
        failed_starts: how often a start has failed since one succeeded.
        lost: why the last one ended.
        given_up: nobody will sit there any more.
        settled: set when the first one has started, or was given up.
    """

    kind: str
    index: int
    handle: Any = None
    num_starts: int = 0
    restarts: int = 0
    failed_starts: int = 0
    lost: str = ""
    given_up: bool = False
    settled: asyncio.Event = field(factory=asyncio.Event)

    @property
    def name(self) -> str:
        """What texts and peers call it."""
        return f"{self.kind} {self.index}"


def seats_of(kind: str, count: int) -> list[Seat]:
    """Return empty seats."""
    return [Seat(kind, index) for index in range(count)]


def live(seats: list[Seat]) -> list[Seat]:
    """Return the seats where somebody sits."""
    return [seat for seat in seats if seat.handle is not None]


class Keeper(Protocol):
    """What the owner of some seats does about them."""

    seats: list[Seat]

    async def start(self, seat: Seat) -> Any:
        """Put an actor on the seat and return what `attend` waits for; leave nothing behind when it fails."""

    async def attend(self, seat: Seat, watch: Any) -> None:
        """Wait until the actor ends; raise why."""

    def vacate(self, seat: Seat) -> None:
        """End the actor, and tell whom it concerns."""

    def give_up(self, seat: Seat) -> None:
        """Tell that nobody will sit there any more."""

    async def close(self) -> None:
        """Free what the seats have besides their actors."""


@frozen(kw_only=True)
class Patience:
    """
    How long to go on trying.

    Attributes:
        max_restarts: how often in a row one that ran is started again.
        healthy_s: seconds after which one that runs begins a new row.
        max_starts: how often a start is tried.
        backoff_s: seconds before the next try; doubles each time.
        max_backoff_s: most seconds before the next try.
    """

    max_restarts: int = 3
    healthy_s: float = 60.0
    max_starts: int = 3
    backoff_s: float = 0.5
    max_backoff_s: float = 60.0


@define(eq=False)
class Supervisor:
    """Keeps seats taken until it is told to stop."""

    patience: Patience = field(factory=Patience)
    observers: Observers = field(factory=Observers)
    stopping: bool = False

    async def keep(self, keeper: Keeper, seat: Seat) -> None:
        """Start, attend until it dies, and again with back-off, until it is given up."""
        while not self.stopping:
            hopeless, started = False, float("inf")
            seat.num_starts += 1
            try:
                watch = await keeper.start(seat)
                seat.failed_starts, started = 0, time.monotonic()
                seat.settled.set()
                await keeper.attend(seat, watch)
            except Exception as error:  # noqa: BLE001 - whatever ends an actor ends only that actor
                seat.lost = reason_of(error)
                hopeless = isinstance(error, ConfigError | PlacementError)
            if self.stopping:
                return
            if time.monotonic() - started > self.patience.healthy_s:
                seat.restarts = 0
            wait_s = self._count(seat)
            keeper.vacate(seat)
            if hopeless or wait_s is None:
                self._give_up(keeper, seat)
                return
            await asyncio.sleep(wait_s)

    def _count(self, seat: Seat) -> float | None:
        """Return the seconds to wait before the next try; None when there is none."""
        log, patience = structlog.get_logger(), self.patience
        if seat.handle is None:
            seat.failed_starts += 1
            failed, most = seat.failed_starts, patience.max_starts
            wait_s = None if failed >= most else self._backoff(failed)
            log.warning("start failed", actor=seat.name, reason=seat.lost, start=failed, of=most, wait_s=wait_s)
            return wait_s
        if seat.restarts >= patience.max_restarts:
            return None
        seat.restarts += 1
        event = ActorRestarted(kind=seat.kind, index=seat.index, reason=seat.lost, restarts=seat.restarts)
        self.observers.emit("on_actor_restarted", event)
        wait_s = self._backoff(seat.restarts)
        log.warning("actor lost", actor=seat.name, reason=seat.lost, restart=seat.restarts, wait_s=wait_s)
        return wait_s

    def _backoff(self, times: int) -> float:
        return min(self.patience.max_backoff_s, self.patience.backoff_s * 2.0 ** (times - 1))

    @staticmethod
    def _give_up(keeper: Keeper, seat: Seat) -> None:
        structlog.get_logger().error("actor given up", actor=seat.name, reason=seat.lost)
        seat.given_up = True
        seat.settled.set()
        keeper.give_up(seat)


async def settled(seats: list[Seat]) -> None:
    """Wait until every seat is taken; `EngineError` says in one line why one could not be."""
    for seat in seats:
        await seat.settled.wait()
        if seat.given_up:
            tries = f" ({seat.failed_starts} tries)" if seat.failed_starts > 1 else ""
            raise EngineError(f"{seat.name} could not be started: {seat.lost}{tries}")


def reason_of(error: BaseException) -> str:
    """Return one line of an error, out of the task groups and Ray's own wrapping around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    lines = [line for line in _COLOURS.sub("", str(shown)).splitlines() if line.strip()] or [""]
    if len(lines) > 1 and "error raised in its creation task" in lines[0]:
        return lines[-1].strip()  # Ray puts the constructor's whole traceback into the text
    return f"{type(shown).__name__}: {lines[0].strip()}"
