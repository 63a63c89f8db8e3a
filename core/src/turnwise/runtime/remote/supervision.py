"""
Supervision of actors: restarts failed actors with exponential backoff, up to a limit.

A group of actors starts and watches them, and tells others about a loss. This module does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable
from math import inf
from typing import Any, Final, Protocol

import structlog
from attrs import define, field, frozen

from turnwise.errors import ConfigError, DataError, EngineError, TemplateError, WrapperError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import ActorRestarted
from turnwise.runtime.remote.actor_calls import OrderedCalls

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class PlacementError(EngineError):
    """Resources of an actor do not exist or are not free. A retry would not help soon, so none is made."""


@define(eq=False)
class ActorSlot:
    """
    One position in a group of actors. A restart puts a new actor into it.

    `handle` has one writer: `Supervisor.supervise` of this slot, by `ActorGroup.start` and `ActorGroup.release`. All
    other code of the event loop may read it at any time and send to the actor. Messages to a dead actor are dropped.
    An actor that is `leaving` gets no new work and ends when it has finished its own.

    Attributes:
        calls: of the present actor, whose order matters; set with `handle`.
        num_starts: attempts to start an actor, so that no two actors of a slot have the same number.
        settled: set when the first actor has started or waits for weights, or the slot was given up.
        leave_by: time of the loop at which a leaving actor hands over the work that is left.
        retired: no other actor follows one that leaves.
        killed: the driver has killed the actor, so its work is not to blame.
        refusal: text of an error of the config, which every further start would meet.
    """

    kind: str
    index: int
    handle: Any = None
    calls: OrderedCalls = field(factory=OrderedCalls)
    num_starts: int = 0
    restarts: int = 0
    failed_starts: int = 0
    last_error: str = ""
    given_up: bool = False
    settled: asyncio.Event = field(factory=asyncio.Event)
    leaving: asyncio.Event = field(factory=asyncio.Event)
    leave_by: float = inf
    retired: bool = False
    killed: bool = False
    refusal: str = ""
    supervision: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Kind and index, for texts and for other actors."""
        return f"{self.kind} {self.index}"

    def leave(self, reason: str, by: float = inf) -> None:
        """Let the actor finish its work, at the latest by a time of the loop, and end."""
        self.last_error, self.leave_by = reason, by
        self.leaving.set()


def make_slots(kind: str, count: int) -> list[ActorSlot]:
    """Return empty slots."""
    return [ActorSlot(kind, index) for index in range(count)]


def live(slots: list[ActorSlot]) -> list[ActorSlot]:
    """Return the slots that have an actor."""
    return [slot for slot in slots if slot.handle is not None]


def staying(slots: list[ActorSlot]) -> list[ActorSlot]:
    """Return the slots that have an actor, which is not leaving."""
    return [slot for slot in live(slots) if not slot.leaving.is_set()]


def all_given_up(slots: list[ActorSlot]) -> bool:
    """Return whether no slot will have an actor again."""
    return all(slot.given_up for slot in slots)


class ActorGroup(Protocol):
    """Callbacks that the supervisor runs when an actor starts, ends or is given up."""

    slots: list[ActorSlot]

    async def start(self, slot: ActorSlot) -> Awaitable[object]:
        """Start an actor in a slot and return the argument of `watch_actor`; after an error no process is left."""

    async def watch_actor(self, slot: ActorSlot, watch: Awaitable[object]) -> None:
        """Wait until the actor ends, and raise the reason."""

    def release(self, slot: ActorSlot) -> None:
        """Kill the actor, empty the slot and tell the actors that depend on it."""

    async def give_up(self, slot: ActorSlot) -> None:
        """Tell the dependent actors that this slot stays empty."""


@frozen(kw_only=True)
class RestartPolicy:
    """Limits of restarts. The backoff doubles each time; after `healthy_s`, restarts are counted from zero."""

    max_restarts: int = 3
    healthy_s: float = 60.0
    max_starts: int = 3
    backoff_s: float = 0.5
    max_backoff_s: float = 60.0


@define(eq=False)
class Supervisor:
    """Starts the actors of groups again until `stopping` is set."""

    policy: RestartPolicy = field(factory=RestartPolicy)
    observers: Observers = field(factory=Observers)
    stopping: bool = False

    async def supervise(self, group: ActorGroup, slot: ActorSlot) -> None:
        """Start an actor, wait for its end, and start it again after a backoff, until the slot is given up."""
        while not (self.stopping or slot.retired):
            permanent, started = False, float("inf")
            slot.num_starts += 1
            try:
                watch = await group.start(slot)
                slot.failed_starts, started = 0, time.monotonic()
                slot.settled.set()
                await group.watch_actor(slot, watch)
            except Exception as error:  # noqa: BLE001 - an error of one actor must not end the supervision of others
                slot.last_error, original = failure_reason(error), _original_of(error)
                # Another attempt would meet the same config and the same occupied devices.
                if isinstance(original, ConfigError | DataError | TemplateError | WrapperError):
                    slot.refusal = str(original)
                permanent = bool(slot.refusal) or isinstance(original, PlacementError)
            # The run may have been stopped during the awaits above. Then `RayRuntime.stop` ends the actors.
            if self.stopping:
                return
            # No await from here to `release`: no other task can send to the slot between the loss and its handling.
            if slot.leaving.is_set():  # neither a loss nor a failed start
                structlog.get_logger().info("actor left", actor=slot.name, reason=slot.last_error)
                group.release(slot)
                slot.leaving.clear()
                continue
            if time.monotonic() - started > self.policy.healthy_s:
                slot.restarts = 0
            wait_s = self._record_failure(slot)
            group.release(slot)
            if permanent or wait_s is None:
                await self._give_up(group, slot)
                return
            await asyncio.sleep(wait_s)

    def _record_failure(self, slot: ActorSlot) -> float | None:
        """Count a failed start or a loss; return the backoff in seconds, or None at the limit."""
        log, policy = structlog.get_logger(), self.policy
        # `ActorGroup.start` fills the slot last, so an empty slot means that the start itself has failed.
        if slot.handle is None:
            slot.failed_starts += 1
            failed, limit = slot.failed_starts, policy.max_starts
            wait_s = None if failed >= limit else self._backoff(failed)
            log.warning("start failed", actor=slot.name, reason=slot.last_error, start=failed, of=limit, wait_s=wait_s)
            return wait_s
        if slot.restarts >= policy.max_restarts:
            return None
        slot.restarts += 1
        event = ActorRestarted(kind=slot.kind, index=slot.index, reason=slot.last_error, restarts=slot.restarts)
        self.observers.emit("on_actor_restarted", event)
        wait_s = self._backoff(slot.restarts)
        log.warning("actor lost", actor=slot.name, reason=slot.last_error, restart=slot.restarts, wait_s=wait_s)
        return wait_s

    def _backoff(self, attempts: int) -> float:
        return min(self.policy.max_backoff_s, self.policy.backoff_s * 2.0 ** (attempts - 1))

    @staticmethod
    async def _give_up(group: ActorGroup, slot: ActorSlot) -> None:
        structlog.get_logger().error("actor given up", actor=slot.name, reason=slot.last_error)
        # In this order: `wait_until_started` wakes up at the event and reads the flag, and a group counts the flags.
        slot.given_up = True
        slot.settled.set()
        await group.give_up(slot)


async def wait_until_started(slots: list[ActorSlot]) -> None:
    """
    Wait until every slot has had an actor.

    Raises:
        ConfigError: one was given up because of the config, and what it found.
        EngineError: one was given up for another reason, which is in the same line.
    """
    # In the order of the start: the first failure causes the later ones.
    for slot in slots:
        await slot.settled.wait()
        if slot.given_up and slot.refusal:
            raise ConfigError(f"{slot.name} could not be started: {slot.refusal}")
        if slot.given_up:
            tries = f" ({slot.failed_starts} tries)" if slot.failed_starts > 1 else ""
            raise EngineError(f"{slot.name} could not be started: {slot.last_error}{tries}")


def failure_reason(error: BaseException) -> str:
    """Return class and first line of an error, without the task groups and Ray's errors around it."""
    original = _original_of(error)
    lines = [line for line in _COLOURS.sub("", str(original)).splitlines() if line.strip()] or [""]
    if len(lines) > 1 and "error raised in its creation task" in lines[0]:
        return lines[-1].strip()  # Ray puts the whole traceback of the constructor into the text
    return f"{type(original).__name__}: {lines[0].strip()}"


def _original_of(error: BaseException) -> BaseException:
    """Return the error inside of task groups and of Ray's error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
