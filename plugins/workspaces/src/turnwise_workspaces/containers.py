"""The backend `containers`: containers of podman or docker, by their command line."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import signal
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, evolve, field, frozen

from turnwise import Resources
from turnwise.errors import ConfigError, InfrastructureError
from turnwise_workspaces.config import ContainersConfig
from turnwise_workspaces.engine_command import (
    Collected,
    PassedOn,
    ask_engine,
    communicate,
    listen_in_network,
    now,
    pids_beside,
    remove_later,
    start_program,
)
from turnwise_workspaces.ownership import LABEL, read_owner, this_process
from turnwise_workspaces.workspace import (
    Capabilities,
    Command,
    ExecResult,
    OnOutput,
    OnStream,
    Orphan,
    Workspace,
    WorkspaceFileError,
    WorkspaceSpec,
)

_MARK: Final = "TURNWISE_COMMAND"
"""Variable by which the processes of a command are found; its children inherit it."""
_INIT: Final = "while :; do sleep 3600 & wait $!; done"
_MERGED: Final = 'exec "$@" 2>&1'
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
_DISKS: Final = ("tmpfs", "quota", "none")
_FILE_S: Final = 30.0
_KILL_S: Final = 5.0
_ENGINE_CODES: Final = frozenset({125, 126, 127, 137, 255})
"""Exit codes that a command has, or the engine itself when it cannot run one."""


@frozen(eq=False)
class ContainersBackend:
    """Starts containers that have a label with their owner."""

    config: ContainersConfig
    resources: Resources = field(repr=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            images=True,
            disk_limit=self.config.disk != "none",
            mounts=True,
            programs=True,
            networks=("none", "host"),
        )

    def check(self, spec: WorkspaceSpec) -> None:
        if not spec.image:
            raise ConfigError("image: the backend 'containers' needs one")

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        self.check(spec)
        name = f"turnwise-{uuid.uuid4().hex}"
        workspace = ContainerWorkspace(self.config.command, name, spec.folder)
        try:
            await ask_engine([*self.config.command, *self._run(name, spec)])
            await workspace.find_init()
            await workspace.make_folders(spec.folders)
            for path, data in spec.files.items():
                await workspace.write(path, data)
        except BaseException:
            workspace.kill()
            raise
        return workspace

    async def find_orphans(self) -> Sequence[Orphan]:
        form = f'{{{{.Names}}}}\t{{{{.Label "{LABEL}"}}}}'
        if "podman" in os.path.basename(self.config.command[0]):
            form = f'{{{{.Names}}}}\t{{{{index .Labels "{LABEL}"}}}}'
        listed = await ask_engine([*self.config.command, "ps", "-a", "--filter", f"label={LABEL}", "--format", form])
        pairs = [line.partition("\t") for line in listed.splitlines()]
        owners = [(name, label, read_owner(label)) for name, _, label in pairs]
        return [Orphan(name=name, owner=label) for name, label, owner in owners if owner is not None and owner.is_gone]

    async def reap(self) -> Sequence[Orphan]:
        found = await self.find_orphans()
        for orphan in found:
            await ask_engine([*self.config.command, "rm", "-f", orphan.name])
        return found

    def _run(self, name: str, spec: WorkspaceSpec) -> list[str]:
        limits, size = spec.limits, f"size={spec.limits.disk_mb}m"
        disk = {
            "tmpfs": [
                *("--read-only", "--tmpfs", f"{spec.folder}:rw,exec,mode=1777,{size}"),
                *("--tmpfs", f"/tmp:rw,exec,mode=1777,{size}"),
                *(part for each in spec.folders for part in ("--tmpfs", f"{each}:rw,exec,mode=1777,{size}")),
            ],
            "quota": ["--storage-opt", size],
            "none": [],
        }[self.config.disk]
        return [
            *("run", "-d", "--name", name, "--label", f"{LABEL}={this_process()}", "--hostname", "workspace"),
            *("--network", spec.network, "--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)),
            *("--security-opt", "no-new-privileges", "--stop-signal", "KILL", "--workdir", spec.folder),
            *disk,
            *(part for path, source in spec.mounts.items() for part in ("--volume", f"{source}:{path}:ro")),
            *(part for name, value in spec.environment.items() for part in ("--env", f"{name}={value}")),
            *self.config.run_options,
            *("--entrypoint", "/bin/sh", spec.image, "-c", _INIT),
        ]


@define(eq=False)
class ContainerWorkspace:
    """
    A running container.

    Attributes:
        command: of the engine.
        name: of the container.
        folder: working folder.
    """

    command: Sequence[str]
    name: str
    folder: str
    _init: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)

    async def find_init(self) -> None:
        """Remember the first process of the container, by its id on this machine."""
        self._init = int(await ask_engine([*self.command, "inspect", "--format", "{{.State.Pid}}", self.name]))

    async def make_folders(self, folders: Sequence[str]) -> None:
        """Make folders that the image lacks; those in memory are there."""
        if folders:
            await ask_engine([*self.command, "exec", self.name, "mkdir", "-p", *folders])

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        return await self._execute(command, Collected(command.max_output_bytes, on_output))

    async def listen(self) -> socket.socket:
        if self._is_closed:
            raise InfrastructureError("the container has ended")
        return await listen_in_network(self._init)

    async def run(self, command: Command, on_output: OnStream) -> ExecResult:
        return await self._execute(evolve(command, separate=True), PassedOn(take=on_output))

    async def _execute(self, command: Command, collected: Collected) -> ExecResult:
        if self._is_closed:
            raise InfrastructureError("the container has ended")
        started, mark = now(), uuid.uuid4().hex
        shown, hidden = _split_variables({**command.environment, _MARK: mark})
        try:
            process = await start_program(
                self._exec(command, shown), with_input=bool(command.stdin), variables=os.environ | hidden
            )
        except (OSError, ValueError) as error:  # a text that no program can get
            return ExecResult(exit_code=126, stdout=f"{error}\n".encode(errors="replace")[: command.max_output_bytes])
        code = await self._until_end(process, collected, command, mark)
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
        if self._is_closed:
            raise InfrastructureError("the container has ended")
        await self._end(None)

    async def close(self) -> None:
        self._is_closed = True
        await ask_engine([*self.command, "rm", "-f", "--volumes", self.name])

    def kill(self) -> None:
        self._is_closed = True
        remove_later([*self.command, "rm", "-f", "--volumes", self.name])

    def _exec(self, command: Command, variables: Sequence[str]) -> list[str]:
        options = [part for each in variables for part in ("--env", each)]
        options += ["-i"] if command.stdin else []
        argv = command.argv if command.separate else ["/bin/sh", "-c", _MERGED, "sh", *command.argv]
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

    async def _end(self, mark: str | None) -> None:
        """Kill the processes of a command, or all but the first."""
        try:
            async with asyncio.timeout(_KILL_S):
                while self._kill_from_here(mark):  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(0.01)
        except OSError:  # this user may not, or the engine is on another machine
            script = ["/bin/sh", "-c", _KILL, "sh", f"{_MARK}={mark}"] if mark else ["/bin/sh", "-c", "kill -9 -1"]
            await communicate(
                await start_program([*self.command, "exec", self.name, *script], with_input=False), Collected(0)
            )

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
                killed += variables != [b""]  # a zombie has none
            except ProcessLookupError:
                continue
        return killed

    def _absolute(self, path: str) -> str:
        return posixpath.join(self.folder, path)

    async def _use_file(self, what: str, path: str, script: Sequence[str], max_bytes: int, data: bytes) -> bytes:
        if not path or "\0" in path:
            raise WorkspaceFileError(f"Error: cannot {what} {path!r}: no file has this name")
        command = Command(
            argv=("/bin/sh", "-c", *script),
            timeout_s=_FILE_S,
            max_output_bytes=max_bytes + 1000,
            stdin=data,
            separate=True,
        )
        result = await self.exec(command)
        if result.exit_code != 0:
            lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
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
