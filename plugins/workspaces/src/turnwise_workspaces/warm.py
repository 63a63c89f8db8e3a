"""
Warm workspaces: some that have started before an episode asks for one.

One task of the event loop, the keeper, has them until an episode takes one. However this task ends, by `close`, by a
cancellation or with its loop, they end too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from contextvars import Context
from typing import Final, Generic, Protocol, TypeVar

import structlog
from attrs import define, evolve, field

from turnwise.errors import describe, is_cancelled
from turnwise_workspaces.slots import Slot, Slots
from turnwise_workspaces.workspace import Workspace, WorkspaceSpec

W = TypeVar("W", bound=Workspace)
_POLL_S: Final = 0.1
"""Seconds between looks for a free slot, and for episodes of other processes that wait for one."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class Boots(Protocol[W]):
    """Starts and ends workspaces."""

    async def boot(self, spec: WorkspaceSpec, slot: Slot) -> W:
        """Start one in one try. Then the slot is free when it has ended; after a failure the caller frees it."""

    async def end(self, workspace: W) -> None:
        """End one in order, or kill it. It raises nothing but a cancellation, and kills it then, too."""

    def throw_away(self, workspace: W) -> None:
        """Kill one without waiting."""


@define(eq=False)
class WarmWorkspaces(Generic[W]):
    """
    Keeps workspaces of the kinds that episodes asked for last.

    A warm workspace has a slot, as any other has. None starts while an episode waits for a slot, in this process or
    another one of the machine, and warm ones end until no episode waits.

    Attributes:
        number: of workspaces to keep, one for each of the last episodes; 0 keeps none.
        boots: starts and ends them.
        slots: bound the number of all workspaces.
    """

    number: int
    boots: Boots[W]
    slots: Slots
    _wanted: deque[WorkspaceSpec] = field(init=False)
    _ready: list[tuple[WorkspaceSpec, W]] = field(factory=list, init=False)
    _booting: list[WorkspaceSpec] = field(factory=list, init=False)
    _keeper: asyncio.Task[None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)
    _pause_s: float = field(default=0.0, init=False)
    _paused_until: float = field(default=0.0, init=False)
    _num_failed: int = field(default=0, init=False)

    @_wanted.default
    def _make_wanted(self) -> deque[WorkspaceSpec]:
        return deque(maxlen=self.number)

    @property
    def num_ready(self) -> int:
        """Number of workspaces that episodes could take."""
        return len(self._ready)

    def want(self, spec: WorkspaceSpec) -> None:
        """Note that an episode asks for a workspace: one of its kind is kept for a later one."""
        if self.number and self._has_keeper():
            self._wanted.append(_kind_of(spec))
            self._changed.set()

    def take(self, spec: WorkspaceSpec) -> W | None:
        """
        Return a workspace without the files of its specification; None if there is none of this kind.

        The caller ends it. It may have died meanwhile.
        """
        kind = _kind_of(spec)
        found = next((each for each in self._ready if each[0] == kind), None)
        # A workspace belongs to the loop that has started it.
        if found is None or not self._has_keeper():
            return None
        self._ready.remove(found)
        self._changed.set()
        return found[1]

    def take_failures(self) -> int:
        """Return how many starts have failed since the last call."""
        found, self._num_failed = self._num_failed, 0
        return found

    async def close(self) -> None:
        """End the workspaces, and start none until an episode asks for one again. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is None or keeper.get_loop() is not asyncio.get_running_loop():
            return
        ready, self._ready = self._ready, []  # the keeper would kill them without waiting
        self._wanted.clear()
        keeper.cancel()
        try:
            await asyncio.wait([keeper])
        finally:  # `end` kills them when this is cancelled
            async with asyncio.TaskGroup() as ends:
                for _, workspace in ready:
                    ends.create_task(self.boots.end(workspace))

    def _has_keeper(self) -> bool:
        """Return whether the keeper is a task of this loop; begin one if there is none."""
        loop = asyncio.get_running_loop()
        if self._keeper is not None and not self._keeper.done() and not self._keeper.get_loop().is_closed():
            return self._keeper.get_loop() is loop
        self._changed = asyncio.Event()
        # Without the variables of the episode that comes first: its name in the log, and its metrics.
        self._keeper = loop.create_task(self._keep(), context=Context())
        return True

    async def _keep(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    polls = self._step(group)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S if polls else None):
                            await self._changed.wait()
        finally:
            while self._ready:
                self.boots.throw_away(self._ready.pop()[1])

    def _step(self, group: asyncio.TaskGroup) -> bool:
        """Start missing workspaces and end unwanted ones; return whether another process may soon change the need."""
        missing, unwanted = self._compare()
        is_waited_for = self.slots.is_waited_for()
        if is_waited_for and self._ready and not unwanted:
            unwanted = self._ready[:1]
        for each in unwanted:
            self._ready.remove(each)
            group.create_task(self.boots.end(each[1]))
        may_boot = not is_waited_for and asyncio.get_running_loop().time() >= self._paused_until
        while may_boot and missing and (slot := self.slots.take_spare()) is not None:
            kind = missing.pop()
            self._booting.append(kind)
            group.create_task(self._boot(kind, slot))
        return bool(missing or self._ready)

    def _compare(self) -> tuple[list[WorkspaceSpec], list[tuple[WorkspaceSpec, W]]]:
        """Return the kinds of which one is missing, and the workspaces that no late episode asked for."""
        missing, unwanted = list(self._wanted), []
        for kind in self._booting:
            if kind in missing:
                missing.remove(kind)
        for each in self._ready:
            if each[0] in missing:
                missing.remove(each[0])
            else:
                unwanted.append(each)
        return missing, unwanted

    async def _boot(self, kind: WorkspaceSpec, slot: Slot) -> None:
        try:
            workspace = await self.boots.boot(kind, slot)
        except BaseException as error:
            slot.free()
            if is_cancelled() or not isinstance(error, Exception | asyncio.CancelledError):
                raise
            # An episode that boots one itself says what is wrong; until that is mended, this must not load the machine.
            self._num_failed += 1
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._paused_until = asyncio.get_running_loop().time() + self._pause_s
            structlog.get_logger().warning("warm workspace did not start", error=describe(error))
        else:
            self._pause_s = 0.0
            self._ready.append((kind, workspace))
        finally:
            self._booting.remove(kind)
            self._changed.set()


def _kind_of(spec: WorkspaceSpec) -> WorkspaceSpec:
    """Return a specification without files, which can also come into a workspace that has started."""
    return evolve(spec, files={})
