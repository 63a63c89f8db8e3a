"""A running container, which the command line of its engine reaches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import re
import shlex
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Final

from attrs import define, evolve, field

from turnwise.errors import InfrastructureError
from turnwise_workspaces.box.processes import is_dead
from turnwise_workspaces.container_snapshots import (
    CONTINUE,
    Archived,
    Kept,
    archive_limit,
    load_archive,
    new_image,
    remove_images,
    save_command,
    save_image,
)
from turnwise_workspaces.engine_command import (
    Collected,
    PassedOn,
    ask_engine,
    communicate,
    find_loss,
    listen_in_network,
    now,
    pids_beside,
    remove_later,
    start_program,
)
from turnwise_workspaces.workspace import (
    SNAPSHOT_S,
    Command,
    ExecResult,
    OnOutput,
    OnStream,
    Snapshot,
    WorkspaceFileError,
    WorkspaceSpec,
    check_snapshot,
)

_MARK: Final = "TURNWISE_COMMAND"
"""Variable by which the processes of a command are found; its children inherit it."""
_MERGED: Final = '(exec "$@" 2>&1); code=$?; echo "$0 $code" >&2; exit $code'
"""Says the end of the command to the engine's client alone, which may be 0 although it runs: see `find_loss`."""
_ENDED: Final = "ended"
_READ: Final = """
[ -d "$1" ] && { echo "Is a directory" >&2; exit 1; }
[ -e "$1" ] || { echo "No such file or directory" >&2; exit 1; }
[ -f "$1" ] || { echo "Not a regular file" >&2; exit 1; }
tail -c "+$2" < "$1" | head -c "$3"
"""
_WRITE: Final = """
[ -d "$1" ] && { echo "Is a directory" >&2; exit 1; }
if [ -e "$1" ] && ! [ -f "$1" ]; then echo "Not a regular file" >&2; exit 1; fi
mkdir -p "$2" && cat > "$1"
"""
_KILL: Final = """
for d in /proc/[0-9]*; do
  if tr '\\0' '\\n' < "$d/environ" | grep -qx "$1"; then kill -9 "${d#/proc/}"; fi
done 2>/dev/null
"""
_OF_ENGINE: Final = re.compile(
    r"(HOME|LANG|PATH|SHELL|TMPDIR|USER|no_proxy|NO_PROXY|\w+_(proxy|PROXY))\Z"
    r"|(BUILDAH|CONTAINER|CONTAINERS|DBUS|DOCKER|GO\w*|LC|LD|NOTIFY|PODMAN|REGISTRY|SSL|STORAGE|XDG)_"
)
"""Variables that podman or docker may read."""
_FILE_S: Final = 30.0
_KILL_S: Final = 5.0
_ENGINE_CODES: Final = frozenset({125, 126, 127, 137, 255})
"""Exit codes that a command has, or the engine itself when it cannot run one."""
_ONLY_OF_ENGINE: Final = frozenset({125, 255})
"""Exit codes of an engine that fails, which the scripts for files never have."""


@define(eq=False)
class ContainerWorkspace:
    """
    A running container; a restoration replaces it by another one.

    Attributes:
        command: of the engine.
        spec: of the workspace.
        run_arguments: returns the engine's arguments that start a container, by its name and specification.
        in_memory: folders in memory; none if all files are on the disk.
        name: of the container that runs.
    """

    command: Sequence[str]
    spec: WorkspaceSpec
    run_arguments: Callable[[str, WorkspaceSpec], Sequence[str]]
    in_memory: Sequence[str]
    name: str = field(default="", init=False)
    _id: str = field(factory=lambda: uuid.uuid4().hex, init=False)
    _init: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)
    _containers: list[str] = field(factory=list, init=False)
    _images: list[str] = field(factory=list, init=False)
    _kept: dict[str, Kept] = field(factory=dict, init=False)

    @property
    def folder(self) -> str:
        """The working folder."""
        return self.spec.folder

    async def begin(self, image: str, archive: IO[bytes] | None = None) -> None:
        """Start a container, and use it when it has what an archive brings back."""
        name = f"turnwise-{uuid.uuid4().hex}"
        self._containers.append(name)  # before it exists, so that `kill` finds it at any time
        await ask_engine([*self.command, *self.run_arguments(name, evolve(self.spec, image=image))], log_warnings=True)
        init = int(await ask_engine([*self.command, "inspect", "--format", "{{.State.Pid}}", name]))
        if archive is not None:
            await load_archive(self.command, name, archive)
        self.name, self._init = name, init

    async def make_folders(self, folders: Sequence[str]) -> None:
        """Make folders that the image lacks; those in memory are there."""
        if folders:
            await ask_engine([*self.command, "exec", self.name, "mkdir", "-p", *folders])

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        return await self._execute(command, Collected(command.max_output_bytes, on_output))

    async def listen(self) -> socket.socket:
        self._check_open()
        return await listen_in_network(self._init)

    async def run(self, command: Command, on_output: OnStream) -> ExecResult:
        return await self._execute(evolve(command, separate=True), PassedOn(take=on_output))

    async def _execute(self, command: Command, collected: Collected) -> ExecResult:
        self._check_open()
        started, mark = now(), uuid.uuid4().hex
        shown, hidden = _split_variables({**command.environment, _MARK: mark})
        try:
            process = await start_program(
                self._exec(command, shown, mark), with_input=bool(command.stdin), variables=os.environ | hidden
            )
        except (OSError, ValueError) as error:  # a text that no program can get
            return ExecResult(exit_code=126, stdout=f"{error}\n".encode(errors="replace")[: command.max_output_bytes])
        collected.is_merged = not command.separate
        code = await self._until_end(process, collected, command, mark)
        if not command.separate and (loss := find_loss(code, collected.errors, mark)):
            raise InfrastructureError(f"the engine has lost a command: {loss}")
        if code in _ENGINE_CODES:
            await self._check_alive()
        if collected.failure is not None:
            raise collected.failure
        return ExecResult(
            exit_code=code,
            stdout=bytes(collected.stdout),
            stderr=bytes(collected.stderr),
            timed_out=code is None,
            truncated=collected.truncated,
            wall_s=now() - started,
        )

    async def read(self, path: str, *, max_bytes: int, offset: int = 0) -> bytes:
        script = (_READ, "read", self._absolute(path), str(offset + 1), str(max_bytes))
        return await self._use_file("read", path, script, max_bytes, b"")

    async def write(self, path: str, data: bytes) -> None:
        full = self._absolute(path)
        await self._use_file("write", path, (_WRITE, "write", full, posixpath.dirname(full)), 0, data)

    async def end_processes(self) -> None:
        self._check_open()
        if not await self._end(None):
            await self._check_alive()  # without its first process it may have ended

    async def snapshot(self) -> Snapshot:
        self._check_open()
        name = uuid.uuid4().hex
        self._kept[name] = await (self._save_archive() if self.in_memory else self._save_image())
        return Snapshot(workspace=self._id, name=name)

    async def restore(self, snapshot: Snapshot) -> None:
        self._check_open()
        check_snapshot(snapshot, self._id, self._kept)
        kept, before = self._kept[snapshot.name], self.name
        await self._end(None)  # so that a command that runs has a result
        await self.begin(kept.image, kept.archive)
        await self._remove(before)

    async def drop(self, snapshot: Snapshot) -> None:
        self._check_open()
        check_snapshot(snapshot, self._id, self._kept)
        kept = self._kept.pop(snapshot.name)
        if kept.archive is not None:
            kept.archive.close()
            return
        with contextlib.suppress(InfrastructureError):  # it is in use; the end of the workspace removes it
            await ask_engine([*self.command, "rmi", kept.image])
            self._images.remove(kept.image)

    async def close(self) -> None:
        self._is_closed = True
        await self._remove(*self._containers)
        await remove_images(self.command, self._images)
        self._images.clear()
        self._close_archives()

    def kill(self) -> None:
        self._is_closed = True
        removals = (("rm", "-f", "--volumes"), self._containers), (("rmi", "-f"), self._images[::-1])
        # The containers first, because docker removes no image that a container has.
        lines = [f"{shlex.join([*self.command, *what, *names])} || bad=1" for what, names in removals if names]
        if lines:
            remove_later(["/bin/sh", "-c", "\n".join([*lines, '[ -z "$bad" ]'])])
        self._close_archives()

    async def _save_archive(self) -> Kept:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the snapshot
        limit = archive_limit(self.in_memory, self.spec.limits.disk_mb)
        collected = Archived(2**16, file=file, limit=limit)
        argv = save_command(self.in_memory, limit)
        try:
            done = await self._execute(Command(argv=argv, timeout_s=SNAPSHOT_S, separate=True), collected)
            if done.timed_out:  # what paused goes on
                await self.exec(Command(argv=("/bin/sh", "-c", CONTINUE), timeout_s=_FILE_S))
            collected.check()
        except BaseException:
            file.close()
            raise
        return Kept(image=self.spec.image, archive=file)

    async def _save_image(self) -> Kept:
        image = new_image()
        self._images.append(image)
        await save_image(self.command, self.name, image, self.spec.limits.disk_mb * 2**20)
        return Kept(image=image)

    async def _remove(self, *names: str) -> None:
        if names:
            await ask_engine([*self.command, "rm", "-f", "--volumes", *names])
        self._containers = [name for name in self._containers if name not in names]

    def _close_archives(self) -> None:
        for kept in self._kept.values():
            if kept.archive is not None:
                kept.archive.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InfrastructureError("the container has ended")

    def _exec(self, command: Command, variables: Sequence[str], mark: str) -> list[str]:
        options = [part for each in variables for part in ("--env", each)]
        options += ["-i"] if command.stdin else []
        argv = command.argv if command.separate else ["/bin/sh", "-c", _MERGED, mark, *command.argv]
        return [*self.command, "exec", *options, "--workdir", self.folder, self.name, *argv]

    async def _until_end(
        self, process: asyncio.subprocess.Process, collected: Collected, command: Command, mark: str
    ) -> int | None:
        """Return the exit code of a command; None if its time ended, and it was killed."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(communicate(process, collected, command.stdin))
            try:
                done, _ = await asyncio.wait([running], timeout=command.timeout_s)
            except asyncio.CancelledError:
                await self._end(mark)
                raise
            if done:
                return running.result()
            await self._end(mark)
            await asyncio.wait([running], timeout=_KILL_S)
            running.cancel()  # the client, if it has not noticed
        return None

    async def _check_alive(self) -> None:
        """Raise `InfrastructureError` when the container does not run."""
        running = await ask_engine([*self.command, "inspect", "--format", "{{.State.Running}}", self.name])
        if self._is_closed or running.strip() != "true":
            raise InfrastructureError("the container has ended")

    async def _end(self, mark: str | None) -> bool:
        """Kill the processes of a command, or all but the first; return whether this machine has the first."""
        try:
            async with asyncio.timeout(_KILL_S):
                with self._without_new_children() if mark is None else contextlib.nullcontext():
                    while self._kill_from_here(mark):  # noqa: ASYNC110 - of other processes
                        await asyncio.sleep(0.01)
        except OSError:  # this user may not, or the engine is on another machine
            script = ["/bin/sh", "-c", _KILL, "sh", f"{_MARK}={mark}"] if mark else ["/bin/sh", "-c", "kill -9 -1"]
            await communicate(
                await start_program([*self.command, "exec", self.name, *script], with_input=False), Collected(0)
            )
            return False
        return True

    @contextlib.contextmanager
    def _without_new_children(self) -> Iterator[None]:
        """Stop the first process, which else starts its `sleep` again each time that it is killed."""
        pids_beside(self._init)  # fails where its id says nothing
        os.kill(self._init, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGCONT)

    def _kill_from_here(self, mark: str | None) -> int:
        """Kill by the ids of this machine, which works also when the container can start no further process."""
        wanted, killed = f"{_MARK}={mark}".encode(), 0
        for pid in pids_beside(self._init):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
                if mark is not None and wanted not in variables:
                    continue
                os.kill(pid, signal.SIGKILL)
                killed += not is_dead(pid)  # nor by its variables, which a process may have removed
            except ProcessLookupError:
                continue
        return killed

    def _absolute(self, path: str) -> str:
        return posixpath.join(self.folder, path)

    async def _use_file(self, what: str, path: str, script: Sequence[str], max_bytes: int, data: bytes) -> bytes:
        if not path or "\0" in path:
            raise WorkspaceFileError(f"Error: cannot {what} {path!r}: no file has this name")
        command = Command(
            argv=("/bin/sh", "-c", f"{script[0]}\ncode=$?; echo {_ENDED} >&2; exit $code", *script[1:]),
            timeout_s=_FILE_S,
            max_output_bytes=max_bytes + 1000,
            stdin=data,
            separate=True,
        )
        result = await self.exec(command)
        loss = find_loss(result.exit_code, result.stderr, _ENDED)
        if result.exit_code in (0, *_ONLY_OF_ENGINE) and loss:
            raise InfrastructureError(f"the engine has lost a command: {loss}")
        if result.exit_code != 0:
            errors = result.stderr.removesuffix(f"{_ENDED}\n".encode())
            lines = (errors or result.stdout).decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it took too long, or was killed"
            raise WorkspaceFileError(f"Error: cannot {what} {path!r}: {reason}")
        return result.stdout


def _split_variables(environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """
    Return the variables of a command as options of the engine, and the values that it takes from its environment.

    Every user of the machine can read a command line, and some values are keys. The variables that the engine reads
    itself stay on the command line.
    """
    hidden = {name: value for name, value in environment.items() if not _OF_ENGINE.match(name)}
    return [name if name in hidden else f"{name}={value}" for name, value in environment.items()], hidden
