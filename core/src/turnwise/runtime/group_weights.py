"""
What weights the replicas of a pool serve and whether they sleep, and how one that is started again catches up.

A replica comes into rotation only with the weights that the others serve. One that did not take an update which others
took is ended, so that it starts again and catches up; so is one whose weights are torn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import structlog
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.memory import TAGS
from turnwise.runtime.supervision import Seat, live, reason_of
from turnwise.runtime.weight_updates import Apply, WeightUpdates
from turnwise.weight_sources import PairsSource, as_numpy
from turnwise.weights import UpdateReport, Weight, WeightSource


@define(eq=False)
class GroupWeights:
    """
    The weights and the sleep of one pool.

    Attributes:
        updates: how weights are brought; None when no transport is there.
        missing: what to do when there is none, for the error.
        keep_last: hold a copy of the last weights for replicas that are started again.
        version: of the last update that a replica took; 0 is what engines start with.
        level: how deep the pool sleeps; 0 when it is awake.
    """

    updates: WeightUpdates | None = None
    missing: str = "no weight transport is configured"
    keep_last: bool = True
    version: int = field(default=0, init=False)
    level: int = field(default=0, init=False)
    _awake: set[str] = field(factory=lambda: set(TAGS), init=False)
    _last: WeightSource | None = field(default=None, init=False)
    _late: dict[int, Apply] = field(factory=dict, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _changed: asyncio.Condition = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Let waiters share the lock."""
        self._changed = asyncio.Condition(self._lock)

    async def update(
        self, seats: list[Seat], weights: Iterable[Weight], version: int, end: Callable[[Seat, str], None]
    ) -> UpdateReport:
        """
        Bring weights to every live replica, and to those that wait for some before they may serve.

        Args:
            seats: of the pool.
            weights: whatever the run's `prepare` takes.
            version: of them.
            end: ends a replica that serves other weights than the rest; it is started again.
        """
        if self.updates is None:
            raise EngineError(self.missing)
        async with self._lock:
            source = self.updates.prepare(weights)
            if self.keep_last:
                source = await asyncio.to_thread(_copy_of, source)
            handles = {seat.index: _applier(seat.handle) for seat in live(seats)}
            report = await self.updates.update({**handles, **self._late}, source, version)
            self.version, self._last = version, source if self.keep_last else None
            failed = {each.replica: each.error for each in report.replicas if each.error}
            self._late = {index: apply for index, apply in self._late.items() if index in failed}
            for seat in live(seats):
                if seat.index in failed:
                    end(seat, f"it did not take weight version {version}: {failed[seat.index]}")
            self._changed.notify_all()
            return report

    async def sleep(self, seats: list[Seat], level: int) -> None:
        """Put every replica to sleep; `EngineError` names those that could not be."""
        async with self._lock:
            self.level, self._awake = max(level, self.level), set()
            await _all(seats, "sleep", level)

    async def wake_up(self, seats: list[Seat], tags: Sequence[str]) -> None:
        """Wake every replica; `EngineError` names those that could not be."""
        async with self._lock:
            await _all(seats, "wake_up", tuple(tags))
            self._awake.update(tags)
            if len(self._awake) == len(TAGS):
                self.level = 0
            self._changed.notify_all()

    async def until_awake(self) -> None:
        """Wait while the pool sleeps: a replica that starts then would take memory that is lent to a trainer."""
        async with self._lock:
            await self._changed.wait_for(lambda: self.level == 0)

    async def join(self, index: int, handle: Any, enter: Callable[[], None]) -> None:
        """
        Give a new replica the weights of the others, and let it enter.

        Args:
            index: of its seat.
            handle: of its actor.
            enter: makes it known; called when it serves what the others serve, and before the next update begins.
        """
        async with self._lock:
            if self.version and self._last is not None and self.updates is not None:
                await self.updates.update({index: _applier(handle)}, self._last, self.version)
            elif self.version:
                self._late[index] = _applier(handle)
                log = structlog.get_logger()
                log.warning("replica waits for the next weights", replica=index, version=self.version)
                await self._changed.wait_for(lambda: index not in self._late)
            if self.level:
                await handle.sleep.remote(self.level)
                if self._awake:
                    await handle.wake_up.remote(tuple(self._awake))
            enter()


def _applier(handle: Any) -> Apply:
    def apply(offer: Any) -> Any:
        return handle.apply_weights.remote(offer)

    return apply


def _copy_of(source: WeightSource) -> WeightSource:
    return PairsSource(tuple((name, np.array(as_numpy(array))) for name, array in source))


async def _all(seats: list[Seat], method: str, argument: Any) -> None:
    """Call a method of every live replica at the same time."""

    async def one(seat: Seat) -> str:
        try:
            await getattr(seat.handle, method).remote(argument)
        except Exception as error:  # noqa: BLE001 - collected, and raised together below
            return f"{seat.name}: {reason_of(error)}"
        return ""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(seat)) for seat in live(seats)]
    if failed := [task.result() for task in tasks if task.result()]:
        raise EngineError(f"{method} failed: {'; '.join(failed)}")
