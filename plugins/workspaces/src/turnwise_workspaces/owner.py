"""
The owner of a process's workspaces: it starts them, bounds their number, and ends each of them in every case.

A workspace ends when its episode does; at an exception, a cancellation or the end of the time for a release; when its
process exits; and, after a process that was killed, when `reap` is called, as every run does before its first start.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import structlog
from attrs import define, field

from turnwise.errors import ConfigError, InfrastructureError, LostResourceError, describe, is_cancelled
from turnwise.messages import record_metric
from turnwise_workspaces.slots import Slot, Slots
from turnwise_workspaces.warm import WarmWorkspaces
from turnwise_workspaces.workspace import (
    SNAPSHOT_S,
    Command,
    ExecResult,
    OnOutput,
    OnStream,
    Programs,
    Snapshot,
    Snapshots,
    Workspace,
    WorkspaceBackend,
    WorkspaceFileError,
    WorkspaceSpec,
)

T = TypeVar("T")
_FILE_S: Final = 60.0
_REAP_S: Final = 120.0
_ANSWER_S: Final = 5.0
"""Seconds in which a warm workspace must answer when an episode takes it."""
_owners: Final[weakref.WeakSet[WorkspaceOwner]] = weakref.WeakSet()


@define(eq=False, weakref_slot=True)
class OwnedWorkspace:
    """
    A workspace with deadlines of this process's own, so that one that hangs is lost and no episode waits for it.

    After a loss every call raises the same `LostResourceError` at once, and the run may run the episode again.
    """

    _workspace: Workspace
    _grace_s: float
    _lost: LostResourceError | None = field(default=None, init=False)
    _snapshots: set[Snapshot] = field(factory=set, init=False)

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        """Run a command; what `on_output` raises first is raised after the command, and is no loss."""
        failed: list[Exception] = []

        def take(data: bytes) -> None:
            if on_output is not None and not failed:
                try:
                    on_output(data)
                except Exception as error:  # noqa: BLE001 - raised after the command
                    failed.append(error)

        call = lambda: self._workspace.exec(command, on_output and take)  # noqa: E731 - it has one use
        result = await self._guard(call, command.timeout_s + self._grace_s, "a command")
        if failed:
            raise failed[0]
        return result

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        call = lambda: self._workspace.read(path, max_bytes=max_bytes, offset=offset)  # noqa: E731 - it has one use
        return await self._guard(call, _FILE_S, "a read")

    async def write(self, path: str, data: bytes) -> None:
        await self._guard(lambda: self._workspace.write(path, data), _FILE_S, "a write")

    async def listen(self) -> socket.socket:
        return await self._guard(self._programs.listen, _FILE_S, "the network")

    async def run(self, command: Command, on_output: OnStream) -> ExecResult:
        call = lambda: self._programs.run(command, on_output)  # noqa: E731 - it has one use
        return await self._guard(call, command.timeout_s + self._grace_s, "a program")

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now, as `Snapshots.snapshot` says."""
        taken = await self._guard(self._with_snapshots.snapshot, SNAPSHOT_S + self._grace_s, "a snapshot")
        self._snapshots.add(taken)
        return taken

    async def restore(self, snapshot: Snapshot) -> None:
        """Bring back the files of a snapshot, as `Snapshots.restore` says."""
        self._check_snapshot(snapshot)
        call = lambda: self._with_snapshots.restore(snapshot)  # noqa: E731 - it has one use
        await self._guard(call, SNAPSHOT_S + self._grace_s, "a restoration")

    async def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot."""
        self._check_snapshot(snapshot)
        self._snapshots.discard(snapshot)
        await self._guard(lambda: self._with_snapshots.drop(snapshot), _FILE_S, "the end of a snapshot")

    async def end_processes(self) -> None:
        await self._guard(self._workspace.end_processes, _FILE_S, "the end of the processes")

    async def close(self) -> None:
        await self._workspace.close()

    def kill(self) -> None:
        self._workspace.kill()

    @property
    def _programs(self) -> Programs:
        assert isinstance(self._workspace, Programs), "the backend has the capability"
        return self._workspace

    @property
    def _with_snapshots(self) -> Snapshots:
        if not isinstance(self._workspace, Snapshots):
            raise ConfigError("the backend of the workspaces takes no snapshots")
        return self._workspace

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """Raise `ValueError` for a mistake of the caller, which is no loss of the workspace."""
        if snapshot not in self._snapshots:
            raise ValueError("the workspace has no such snapshot: it is of another one, or was dropped")

    async def _guard(self, call: Callable[[], Awaitable[T]], timeout_s: float, what: str) -> T:
        if self._lost is not None:
            raise LostResourceError(str(self._lost)) from self._lost
        try:
            async with asyncio.timeout(timeout_s):
                return await call()
        except TimeoutError as error:
            lost = LostResourceError(f"the workspace is lost: {what} did not end within {timeout_s:g} s")
            cause: Exception = error
        except (WorkspaceFileError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is not the command's doing
            lost, cause = LostResourceError(f"the workspace is lost: {describe(error)}"), error
        self._lost = lost
        self.kill()
        raise lost from cause


@define(eq=False, weakref_slot=True)
class WorkspaceOwner:
    """
    Starts and ends the workspaces of a process.

    Attributes:
        backend: starts them.
        slots: bound their number.
        boot_tries: times that a start is tried.
        close_s: seconds that the end of one may take; after that it is killed without waiting.
        grace_s: seconds that a command may take beyond its own time until its workspace counts as lost.
        num_warm: workspaces that start before an episode asks for one; no workspace serves two episodes.
    """

    backend: WorkspaceBackend
    slots: Slots
    boot_tries: int = 2
    close_s: float = 30.0
    grace_s: float = 10.0
    num_warm: int = 0
    warm: WarmWorkspaces[OwnedWorkspace] = field(init=False)
    _open: dict[OwnedWorkspace, Slot] = field(factory=dict, init=False)
    _has_reaped: bool = field(default=False, init=False)
    _pid: int = field(factory=os.getpid, init=False)

    @warm.default
    def _make_warm(self) -> WarmWorkspaces[OwnedWorkspace]:
        return WarmWorkspaces(self.num_warm, self, self.slots)

    def __attrs_post_init__(self) -> None:
        _owners.add(self)

    @property
    def num_open(self) -> int:
        """Number of workspaces that are open, warm ones included."""
        return len(self._open)

    async def open(self, spec: WorkspaceSpec) -> OwnedWorkspace:
        """
        Take a warm workspace, or start one as soon as there is a slot for it; `close` ends it.

        Raises:
            InfrastructureError: no slot was free in time.
            LostResourceError: it did not start in any of the tries; another worker may be on a better machine.
            ConfigError: the backend cannot fulfil the specification.
        """
        self.backend.check(spec)
        await self._reap_once()
        if self.num_warm and (warm := await self._take_warm(spec)) is not None:
            return warm
        slot = await self.slots.take()
        try:
            return await self._start(spec, slot)
        except BaseException:
            slot.free()
            raise

    async def close(self, workspace: OwnedWorkspace) -> None:
        """
        End a workspace, and wait until it is gone. Idempotent.

        Raises:
            InfrastructureError: it failed to end, or took too long; it was killed without waiting.
        """
        slot = self._open.pop(workspace, None)
        if slot is None:
            return
        try:
            async with asyncio.timeout(self.close_s):
                await workspace.close()
        except BaseException as error:
            workspace.kill()
            if not isinstance(error, Exception) and not (
                isinstance(error, asyncio.CancelledError) and not is_cancelled()
            ):
                raise
            text = f"took more than {self.close_s:g} s" if isinstance(error, TimeoutError) else describe(error)
            raise InfrastructureError(f"a workspace did not end, and was killed: {text}") from error
        finally:
            slot.free()

    async def end(self, workspace: OwnedWorkspace) -> None:
        """End a workspace as `close` does; a failure is only logged."""
        try:
            await self.close(workspace)
        except InfrastructureError as error:
            structlog.get_logger().warning("workspace did not end in order", error=str(error))

    def throw_away(self, workspace: OwnedWorkspace) -> None:
        """Kill a workspace without waiting, and free its slot."""
        workspace.kill()
        if (slot := self._open.pop(workspace, None)) is not None:
            slot.free()

    @asynccontextmanager
    async def workspace(self, spec: WorkspaceSpec) -> AsyncIterator[OwnedWorkspace]:
        """Open a workspace, and close it at the end of the block."""
        opened = await self.open(spec)
        try:
            yield opened
        finally:
            await self.close(opened)

    def kill_all(self) -> None:
        """Kill what is open, without waiting; this process ends."""
        if os.getpid() != self._pid:  # a forked child, whose parent has them
            return
        while self._open:
            workspace, slot = self._open.popitem()
            workspace.kill()
            slot.free()

    async def boot(self, spec: WorkspaceSpec, slot: Slot) -> OwnedWorkspace:
        """Start a workspace in one try; it has the slot until it ends, and after a failure the caller has it."""
        async with asyncio.timeout(spec.boot_s):
            workspace = OwnedWorkspace(await self.backend.start(spec), self.grace_s)
        self._open[workspace] = slot
        return workspace

    async def _take_warm(self, spec: WorkspaceSpec) -> OwnedWorkspace | None:
        """Return a warm workspace that has answered and has its files; None if there is none."""
        record = record_metric.get(_record_nothing)
        if failures := self.warm.take_failures():
            record("workspace_warm_failures", float(failures))
        self.warm.want(spec)
        while (workspace := self.warm.take(spec)) is not None:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await workspace.end_processes()
                async with asyncio.timeout(spec.boot_s):
                    for path, data in spec.files.items():
                        await workspace.write(path, data)
            except WorkspaceFileError as error:
                self.throw_away(workspace)
                raise InfrastructureError(f"a workspace cannot be started: {error}") from error
            except BaseException as error:
                self.throw_away(workspace)
                if not isinstance(error, Exception):
                    raise
                # The episode is not at fault: it has not begun in this workspace.
                structlog.get_logger().warning("warm workspace was lost before its use", error=describe(error))
                record("workspace_warm_losses", 1.0)
            else:
                record("workspace_warm_hits", 1.0)
                return workspace
        record("workspace_warm_misses", 1.0)
        return None

    async def _start(self, spec: WorkspaceSpec, slot: Slot) -> OwnedWorkspace:
        for number in range(1, self.boot_tries + 1):
            try:
                return await self.boot(spec, slot)
            except (ConfigError, WorkspaceFileError) as error:  # another try would fail in the same way
                raise InfrastructureError(f"a workspace cannot be started: {error}") from error
            except Exception as error:  # noqa: BLE001 - whatever a backend raises, no episode is to blame
                late = isinstance(error, TimeoutError)
                text = f"it took more than {spec.boot_s:g} s" if late else describe(error)
                structlog.get_logger().warning("workspace did not start", attempt=number, error=text)
                failure, cause = text, error
        raise LostResourceError(f"a workspace did not start in {self.boot_tries} tries: {failure}") from cause

    async def _reap_once(self) -> None:
        if self._has_reaped:
            return
        self._has_reaped = True
        try:
            async with asyncio.timeout(_REAP_S):
                reaped = await self.backend.reap()
        except Exception as error:  # noqa: BLE001 - the run can work without; a backend that is broken will say so
            structlog.get_logger().warning("left workspaces cannot be removed", error=describe(error))
        else:
            if reaped:
                structlog.get_logger().warning("removed workspaces of processes that are gone", number=len(reaped))


def _record_nothing(_name: str, _value: float) -> None:
    """Record no metric: no episode asks."""


@atexit.register
def _kill_all() -> None:
    for owner in list(_owners):
        owner.kill_all()
