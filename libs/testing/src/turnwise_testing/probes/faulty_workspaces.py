"""Backends of workspaces for tests: one in memory, which counts what is open, and faults around any other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from turnwise.errors import InfrastructureError
from turnwise_workspaces import (
    Capabilities,
    Command,
    ExecResult,
    Orphan,
    Snapshot,
    Snapshots,
    Workspace,
    WorkspaceBackend,
    WorkspaceFileError,
    WorkspaceSpec,
)
from turnwise_workspaces.workspace import OnOutput, check_snapshot


@define(eq=False)
class MemoryBackend:
    """
    Workspaces with files in memory, which run no command: each succeeds, and prints its arguments.

    Attributes:
        running: the ones that are not closed.
        num_started: how many were.
    """

    running: set[MemoryWorkspace] = field(factory=set, init=False)
    num_started: int = field(default=0, init=False)
    capabilities = Capabilities(snapshots=True)

    def check(self, spec: WorkspaceSpec) -> None:
        """Every specification is fulfilled."""

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        await asyncio.sleep(0)
        self.num_started += 1
        workspace = MemoryWorkspace(self, dict(spec.files))
        self.running.add(workspace)
        return workspace

    async def find_orphans(self) -> Sequence[Orphan]:
        return ()

    async def reap(self) -> Sequence[Orphan]:
        return ()


@define(eq=False)
class MemoryWorkspace:
    """A workspace of `MemoryBackend`."""

    _backend: MemoryBackend
    _files: dict[str, bytes]
    _name: str = field(factory=lambda: uuid.uuid4().hex, init=False)
    _kept: dict[str, dict[str, bytes]] = field(factory=dict, init=False)

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        await asyncio.sleep(0)
        self._check()
        output = " ".join(command.argv).encode()[: command.max_output_bytes]
        if on_output is not None:
            on_output(output)
        return ExecResult(exit_code=0, stdout=output)

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        self._check()
        if path not in self._files:
            raise WorkspaceFileError(f"Error: cannot read {path!r}: No such file or directory")
        return self._files[path][offset : offset + max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self._check()
        self._files[path] = data

    async def end_processes(self) -> None:
        self._check()

    async def snapshot(self) -> Snapshot:
        self._check()
        taken = Snapshot(workspace=self._name, name=uuid.uuid4().hex)
        self._kept[taken.name] = dict(self._files)
        return taken

    async def restore(self, snapshot: Snapshot) -> None:
        self._check()
        check_snapshot(snapshot, self._name, self._kept)
        self._files = dict(self._kept[snapshot.name])

    async def drop(self, snapshot: Snapshot) -> None:
        self._check()
        check_snapshot(snapshot, self._name, self._kept)
        del self._kept[snapshot.name]

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._backend.running.discard(self)

    def _check(self) -> None:
        if self not in self._backend.running:
            raise InfrastructureError("the workspace has ended")


@frozen(kw_only=True)
class Faults:
    """
    Faults of a backend.

    Attributes:
        failing_starts: number of first starts that fail.
        hanging_starts: number of first starts, after the failing ones, that do not end.
        exec_hangs: commands do not end.
        exec_loses: the workspace goes away during a command.
        exec_raises: a command raises an error that no backend should.
        snapshot_hangs: snapshots do not end.
        restore_loses: the workspace goes away during a restoration.
        close_fails: the end of a workspace fails, and leaves it running.
        close_hangs: the end of a workspace does not end.
    """

    failing_starts: int = 0
    hanging_starts: int = 0
    exec_hangs: bool = False
    exec_loses: bool = False
    exec_raises: bool = False
    snapshot_hangs: bool = False
    restore_loses: bool = False
    close_fails: bool = False
    close_hangs: bool = False


@define(eq=False)
class PassingWorkspace:
    """Passes every call on to the workspace inside; a subclass adds faults."""

    inner: Workspace

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        return await self.inner.exec(command, on_output)

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        return await self.inner.read(path, max_bytes=max_bytes, offset=offset)

    async def write(self, path: str, data: bytes) -> None:
        await self.inner.write(path, data)

    async def end_processes(self) -> None:
        await self.inner.end_processes()

    async def snapshot(self) -> Snapshot:
        return await self._snapshots.snapshot()

    async def restore(self, snapshot: Snapshot) -> None:
        await self._snapshots.restore(snapshot)

    async def drop(self, snapshot: Snapshot) -> None:
        await self._snapshots.drop(snapshot)

    async def close(self) -> None:
        await self.inner.close()

    def kill(self) -> None:
        self.inner.kill()

    @property
    def _snapshots(self) -> Snapshots:
        assert isinstance(self.inner, Snapshots), "the backend has the capability"
        return self.inner


@define(eq=False)
class PassingBackend:
    """Passes every call on to the backend inside; a subclass adds faults."""

    inner: WorkspaceBackend

    @property
    def capabilities(self) -> Capabilities:
        return evolve(self.inner.capabilities, programs=False)  # its workspaces do not pass them on

    def check(self, spec: WorkspaceSpec) -> None:
        self.inner.check(spec)

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        return await self.inner.start(spec)

    async def find_orphans(self) -> Sequence[Orphan]:
        return await self.inner.find_orphans()

    async def reap(self) -> Sequence[Orphan]:
        return await self.inner.reap()


async def hang_with(workspace: Workspace) -> None:
    """Wait until cancelled, as a start that does not end, and close the workspace then."""
    try:
        await asyncio.Event().wait()
    finally:
        await workspace.close()


@define(eq=False)
class FaultyBackend(PassingBackend):
    """
    A backend with faults around another one.

    Attributes:
        faults: of this one.
        num_calls: calls of `start`.
    """

    faults: Faults
    num_calls: int = field(default=0, init=False)

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        self.num_calls += 1
        if self.num_calls <= self.faults.failing_starts:
            raise InfrastructureError("no machine is free")
        workspace = await self.inner.start(spec)
        if self.num_calls <= self.faults.failing_starts + self.faults.hanging_starts:
            await hang_with(workspace)
        return _FaultyWorkspace(workspace, self.faults)


@define(eq=False)
class _FaultyWorkspace(PassingWorkspace):
    faults: Faults

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        if self.faults.exec_hangs:
            await asyncio.Event().wait()
        if self.faults.exec_raises:
            raise RuntimeError("a mistake in a backend")
        if self.faults.exec_loses:
            await self.inner.close()
        return await self.inner.exec(command, on_output)

    async def snapshot(self) -> Snapshot:
        if self.faults.snapshot_hangs:
            await asyncio.Event().wait()
        return await super().snapshot()

    async def restore(self, snapshot: Snapshot) -> None:
        if self.faults.restore_loses:
            await self.inner.close()
        await super().restore(snapshot)

    async def close(self) -> None:
        if self.faults.close_hangs:
            await asyncio.Event().wait()
        if self.faults.close_fails:
            raise OSError("the machine does not answer")
        await self.inner.close()
