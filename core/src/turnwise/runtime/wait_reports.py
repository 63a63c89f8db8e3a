"""Reports the parts that a run waits for, when nothing has happened for some time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
from attrs import define, field

from turnwise.events.dispatch import Observers
from turnwise.events.observer import RunWaiting, Wait
from turnwise.runtime.interface import Runtime

QUIET_S: Final = 10.0
"""Seconds without an event after which a run reports its waits; it reports again when they have doubled."""
_LOOK_S: Final = 2.5
_MAX_SHOWN: Final = 5


@define(eq=False)
class WaitReports:
    """
    Looks at a runtime every few seconds, on its event loop.

    Nothing has happened for as long as the youngest of all waits: whatever ends, the run waits for something new.

    Attributes:
        num_calls: that run; without one, the run waits for its stages alone.
    """

    runtime: Runtime
    observers: Observers
    num_calls: int = field(default=0, init=False)
    _stages: dict[object, str] = field(factory=dict, init=False)
    _since: dict[object, float] = field(factory=dict, init=False)  # of stages, on the loop's clock
    _due_s: float = field(default=QUIET_S, init=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the body as a wait of the run for a part with this name; for any thread."""
        key = object()
        self._stages[key] = name
        try:
            yield
        finally:
            del self._stages[key]

    async def run(self) -> None:
        """Report until the task is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._report(await self._find())

    async def _find(self) -> list[Wait]:
        now, stages = asyncio.get_running_loop().time(), dict(self._stages)
        self._since = {key: self._since.get(key, now) for key in stages}
        seconds = {name: now - self._since[key] for key, name in stages.items()}
        waits = [Wait(part=name, seconds=each, shortest_s=each) for name, each in seconds.items()]
        if self.num_calls or self._stages:
            try:
                waits += await self.runtime.waits()
            except Exception as error:  # noqa: BLE001 - a report must not end a run
                structlog.get_logger().debug("the waits of the run are unknown", reason=repr(error))
        return waits

    def _report(self, waits: list[Wait]) -> None:
        seconds = min((wait.shortest_s for wait in waits), default=0.0)
        if seconds < QUIET_S:
            if self._due_s > QUIET_S:
                self._due_s = QUIET_S
                self.observers.emit("on_run_waiting", RunWaiting(seconds=0.0))
        elif seconds >= self._due_s:
            self._due_s = 2 * seconds
            more = [f"and {len(waits) - _MAX_SHOWN} other parts"] if len(waits) > _MAX_SHOWN else []
            shown = [*map(str, waits[:_MAX_SHOWN]), *more]
            structlog.get_logger().info("the run waits", seconds=round(seconds), waits_for=shown)
            self.observers.emit("on_run_waiting", RunWaiting(seconds=seconds, waits=tuple(waits)))
