"""
Workspaces: isolated places with files and processes, in which the agent of one episode works.

A backend starts them. The kind of part is `workspaces`; a plugin registers a backend as it registers any part::

    @turnwise.hookimpl
    def register_workspaces(registry):
        registry.add("my_boxes", MyBackend, config=MyConfig)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Literal, Protocol, get_args, runtime_checkable

from attrs import field, frozen, validators

import turnwise
from turnwise import Registry
from turnwise.errors import ToolError

DEFAULT_OUTPUT_BYTES: Final = 2**20
SNAPSHOT_S: Final = 60.0
"""Seconds that a snapshot may take until what the agent left counts as too much."""


class WorkspaceFileError(ToolError):
    """A file of a workspace cannot be read or written, by the agent's doing; the text is for the model."""


@frozen(kw_only=True)
class Limits:
    """
    What the processes of a workspace may use together.

    Attributes:
        memory_mb: MiB of memory.
        processes: number of processes and threads.
        disk_mb: MiB of the files that they write; a backend says in its README which folders count.
    """

    memory_mb: int = field(default=1024, validator=validators.ge(16))
    processes: int = field(default=128, validator=validators.ge(4))
    disk_mb: int = field(default=512, validator=validators.ge(1))


Network = Literal["none", "host"]


@frozen(kw_only=True)
class WorkspaceSpec:
    """
    A workspace to start.

    Attributes:
        image: of the root file system; empty for the backend's own.
        folder: absolute path of the working folder, which is empty at first unless the image fills it.
        folders: absolute paths of more folders, empty at first, that the agent's processes can write. A backend whose
            root file system is read-only makes each of them a file system that no process can move or replace.
        files: contents by path, relative to the folder or absolute; they are written at the start.
        environment: variables of every command, besides the ones of the backend.
        mounts: files and folders of this machine that the workspace shows, read-only, by absolute path in it.
        limits: of the processes together.
        network: `none` has a loopback and nothing else; `host` is this machine's, with the servers at its loopback.
        boot_s: seconds from the start until the files are written.
    """

    image: str = ""
    folder: str = field(default="/workspace", validator=validators.matches_re(r"(/[^/\0]+)+"))
    folders: tuple[str, ...] = field(
        default=(), validator=validators.deep_iterable(validators.matches_re(r"(/[^/\0]+)+"))
    )
    files: Mapping[str, bytes] = field(factory=dict)
    environment: Mapping[str, str] = field(factory=dict)
    mounts: Mapping[str, str] = field(factory=dict)
    limits: Limits = field(factory=Limits)
    network: Network = field(default="none", validator=validators.in_(get_args(Network)))
    boot_s: float = field(default=60.0, validator=validators.gt(0.0))


@frozen(kw_only=True)
class Command:
    """
    A command to run in a workspace.

    Attributes:
        argv: program and arguments; a name without a slash is searched in PATH.
        timeout_s: seconds until its processes are killed.
        max_output_bytes: of its outputs together that are kept; it may write more, which is dropped.
        stdin: its standard input.
        environment: variables besides those of the workspace.
        separate: keep standard error apart from standard output.
    """

    argv: Sequence[str] = field(validator=validators.min_len(1))
    timeout_s: float = field(default=60.0, validator=validators.gt(0.0))
    max_output_bytes: int = field(default=DEFAULT_OUTPUT_BYTES, validator=validators.ge(0))
    stdin: bytes = b""
    environment: Mapping[str, str] = field(factory=dict)
    separate: bool = False


@frozen(kw_only=True)
class ExecResult:
    """
    The result of a command.

    Attributes:
        exit_code: of the command, minus the number of the signal that killed it; None when it was killed at the end of
            its time.
        stdout: the beginning of its output, in the order in which it was written; with standard error, unless
            `Command.separate`.
        stderr: the beginning of standard error with `Command.separate`; otherwise empty.
        timed_out: its time ended.
        truncated: it wrote more than `max_output_bytes`.
        limit: `memory` or `processes` if it was killed because the workspace passed that limit and the backend knows.
        wall_s: seconds that it took.
    """

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    limit: Literal["", "memory", "processes"] = ""
    wall_s: float = 0.0


OnOutput = Callable[[bytes], None]
"""Called on the event loop with each piece of a command's output that is kept, as it comes."""
OnStream = Callable[[Literal["out", "err"], bytes], None]
"""Called on the event loop with each piece of a program's standard output, or of its standard error, as it comes."""


@runtime_checkable
class Workspace(Protocol):
    """
    A running workspace. Its methods may be called at the same time.

    Each method may raise `turnwise.errors.InfrastructureError`: the workspace is lost, or cannot be asked. Nothing that
    the agent's processes do causes one.
    """

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        """
        Run a command in the working folder, until its first process ends.

        Processes that it leaves in the background live on, until the workspace ends or `end_processes`. At the end of
        its time, or when this call is cancelled, its processes are killed. A program that does not exist is a result.
        """

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        """
        Return at most `max_bytes` of a file; a relative path starts from the working folder.

        Raises:
            WorkspaceFileError: there is no such regular file, or it cannot be read.
        """

    async def write(self, path: str, data: bytes) -> None:
        """
        Write a file, and create its parent folders; replace what it holds.

        Raises:
            WorkspaceFileError: it cannot be written, for example because the disk is full.
        """

    async def end_processes(self) -> None:
        """Kill every process of the agent, those in the background too; a command that runs has a result."""

    async def close(self) -> None:
        """End the workspace with its processes and files, and wait until they are gone. Idempotent."""

    def kill(self) -> None:
        """Begin to end the workspace, without waiting, from any thread; it never raises."""


@frozen(kw_only=True)
class Snapshot:
    """
    The files of a workspace as they were at a moment; only that workspace can use it, until it ends.

    Attributes:
        workspace: name of the workspace.
        name: of the snapshot in it.
    """

    workspace: str
    name: str


@runtime_checkable
class Snapshots(Protocol):
    """
    Optional methods of a workspace whose backend has the capability `snapshots`.

    A snapshot has the files that the agent's processes can write, with contents, modes, times of change, links and
    empty folders, and without sockets. It has no processes. The variables of commands are those of the specification
    before and after.
    """

    async def snapshot(self) -> Snapshot:
        """
        Keep the files as they are now.

        Processes that run pause meanwhile; a command that starts meanwhile may or may not have changed what is kept.
        Snapshots take memory or disk until `drop` or the end of the workspace.

        Raises:
            WorkspaceFileError: what the agent left cannot be copied, or takes more than `SNAPSHOT_S` seconds.
        """

    async def restore(self, snapshot: Snapshot) -> None:
        """
        Kill every process, and bring back the files of a snapshot, as often as wished.

        A command that runs has a result. No command may start until this has ended. The sockets of `Programs.listen`
        may end.

        Raises:
            ValueError: this workspace has no such snapshot.
        """

    async def drop(self, snapshot: Snapshot) -> None:
        """
        Remove a snapshot.

        Raises:
            ValueError: this workspace has no such snapshot.
        """


def check_snapshot(snapshot: Snapshot, workspace: str, known: Container[str]) -> None:
    """Raise `ValueError` unless a snapshot is one of the known ones of a workspace."""
    if snapshot.workspace != workspace or snapshot.name not in known:
        raise ValueError("the workspace has no such snapshot: it is of another one, or was dropped")


@runtime_checkable
class Programs(Protocol):
    """Optional methods of a workspace whose backend has the capability `programs`: an outside agent can run in it."""

    async def listen(self) -> socket.socket:
        """
        Return a socket of this process that listens at 127.0.0.1 in the workspace, at a free port there.

        The processes of the workspace can connect to it, and nobody else. The caller closes it.
        """

    async def run(self, command: Command, on_output: OnStream) -> ExecResult:
        """
        Run a command as `exec` does, and hand over its whole output, of which the result has nothing.

        `on_output` must not raise.
        """


@frozen(kw_only=True)
class Capabilities:
    """
    What a backend can do.

    Attributes:
        images: a specification may name an image.
        disk_limit: `Limits.disk_mb` is enforced.
        snapshots: its workspaces have the methods of `Snapshots`.
        mounts: a specification may have mounts.
        programs: its workspaces have the methods of `Programs`.
        networks: the values of `WorkspaceSpec.network` that it knows.
    """

    images: bool = False
    disk_limit: bool = False
    snapshots: bool = False
    mounts: bool = False
    programs: bool = False
    networks: tuple[Network, ...] = ("none",)


@frozen(kw_only=True)
class Orphan:
    """
    Something that a killed process left.

    Attributes:
        name: of the container or process.
        owner: label of the process that started it.
    """

    name: str
    owner: str


@runtime_checkable
class WorkspaceBackend(Protocol):
    """Starts workspaces. One object serves all episodes of a process."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def check(self, spec: WorkspaceSpec) -> None:
        """Raise `ConfigError` for a specification that it cannot fulfil; it starts nothing."""

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        """
        Start a workspace with its files, and wait until it can be used.

        A start that is cancelled or fails leaves nothing. The owner of the workspace sets the deadline.

        Raises:
            InfrastructureError: it does not start.
        """

    async def find_orphans(self) -> Sequence[Orphan]:
        """Return what this backend started on this machine for processes that are gone."""

    async def reap(self) -> Sequence[Orphan]:
        """Remove what `find_orphans` finds, and return it."""


@turnwise.hookspec
def register_workspaces(registry: Registry[WorkspaceBackend]) -> None:
    """Add backends of workspaces; see `WorkspaceBackend`."""
