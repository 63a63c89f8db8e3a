"""The backend `bubblewrap`: boxes on this machine, made of its programs, with nothing to install but bwrap."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import signal
import sys
import uuid
from collections.abc import Iterable, Sequence
from importlib import resources as package_files
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from turnwise import Resources
from turnwise.errors import ConfigError, InfrastructureError
from turnwise_workspaces.box_channel import BoxChannel
from turnwise_workspaces.box_workspace import BoxWorkspace
from turnwise_workspaces.config import BubblewrapConfig
from turnwise_workspaces.mounts import find_closed, is_under
from turnwise_workspaces.ownership import LABEL, read_owner, this_process
from turnwise_workspaces.workspace import Capabilities, Orphan, Workspace, WorkspaceSpec

_MIB: Final = 2**20
_SHOWN: Final = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
"""Folders and links of this machine that a box shows, read-only."""
_SHOWN_IN_ETC: Final = (
    *("/etc/alternatives", "/etc/ca-certificates", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/localtime", "/etc/mime.types", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/terminfo"),
)
_OF_NETWORK: Final = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/services")
_CODE: Final = "/etc/turnwise"
_MODULES: Final = ("__init__", "archive", "files", "messages", "processes", "supervisor")
_START: Final = (
    f"import sys; sys.path.insert(0, {_CODE!r}); from turnwise_workspaces.box.supervisor import main; main()"
)
_MARK: Final = "turnwise-box"
_USER: Final = 1000
"""User and group id in the box."""
_ACCOUNTS: Final = {
    "/etc/passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{_USER}:{_USER}::/tmp/home:/bin/sh\n",
    "/etc/group": f"root:x:0:\nagent:x:{_USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost workspace\n",
}
_FIRST_UID: Final = 61000
_NUM_UIDS: Final = 4096
_numbers: Final = itertools.count()


@frozen(eq=False)
class BubblewrapBackend:
    """
    Starts boxes.

    A box has its namespaces for processes, mounts, users and the rest, and for the network too unless the specification
    says `host`. Its root is read-only and
    shows programs of this machine. The working folder and /tmp are in memory. The first process is a supervisor, and
    the box ends with it, and with the process that started it.
    """

    config: BubblewrapConfig
    resources: Resources = field(repr=False)

    capabilities = Capabilities(disk_limit=True, snapshots=True, mounts=True, programs=True, networks=("none", "host"))

    def check(self, spec: WorkspaceSpec) -> None:
        if spec.image:
            raise ConfigError(f"image: the backend 'bubblewrap' shows this machine's programs, not {spec.image!r}")
        for path in self.config.readable:
            if not path.startswith("/"):
                raise ConfigError(f"readable: expected an absolute path, not {path!r}")
        for folder in (spec.folder, *spec.folders):
            if is_under(folder, (*_SHOWN, "/dev", "/etc", "/proc", "/tmp")):
                raise ConfigError(f"folder: a box cannot have its working folder at {folder}; choose /workspace")
        for path, source in spec.mounts.items():
            if is_under(path, (*_SHOWN, *_SHOWN_IN_ETC, *_OF_NETWORK, _CODE, *_ACCOUNTS)):
                raise ConfigError(f"mounts: {path}: a box shows this machine's there; choose a path such as /opt/agent")
            if os.geteuid() == 0 and (closed := find_closed(source)):
                text = f"only root may enter {closed}, and boxes have another user; change its mode, or take a copy"
                raise ConfigError(f"mounts: {path}: {source} cannot be shown: {text}")

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        self.check(spec)
        uid, mark = _find_uid(), uuid.uuid4().hex
        channel: BoxChannel | None = None
        with _Descriptors() as kept:
            info = kept.pipe()
            command = self._command(spec, kept, info.write, mark)
            if uid is not None:  # by a program, because Python would copy this whole process to change its user
                command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
            try:
                channel = BoxChannel(command, kept.passed)
                kept.close_passed()
                await channel.connect()
                channel.begin(_settings(spec))
                await channel.ready
                channel.watch_first_process(info.read)
                workspace = BoxWorkspace(channel)
                for path, data in spec.files.items():
                    await workspace.write(path, data)
            except BaseException as error:
                if channel is not None:
                    channel.watch_first_process(info.read)
                    await channel.give_up()
                await _kill_marked(mark)
                if isinstance(error, OSError):
                    raise InfrastructureError(f"bubblewrap cannot be started: {error.strerror}") from error
                raise
        return workspace

    async def find_orphans(self) -> Sequence[Orphan]:
        return [orphan for _, orphan in _find_orphans()]

    async def reap(self) -> Sequence[Orphan]:
        found = _find_orphans()
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return [orphan for _, orphan in found]

    def _command(self, spec: WorkspaceSpec, kept: _Descriptors, info: int, mark: str) -> list[str]:
        program = shutil.which("bwrap")
        if program is None:
            raise InfrastructureError("bubblewrap is not installed (Debian, Ubuntu: apt-get install bubblewrap)")
        package = package_files.files("turnwise_workspaces.box")
        code = {name: (package / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}
        on_host = spec.network == "host"
        own = {path: text for path, text in _ACCOUNTS.items() if not (on_host and path in _OF_NETWORK)}
        data = own | {f"{_CODE}/turnwise_workspaces/box/{name}.py": text for name, text in code.items()}
        files = [part for path, text in data.items() for part in ("--ro-bind-data", kept.data(text), path)]
        size = str(spec.limits.disk_mb * _MIB)
        return [
            *(program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(info)),
            *("--hostname", "workspace", "--uid", str(_USER), "--gid", str(_USER), "--cap-drop", "ALL", "--clearenv"),
            # In a namespace of users of its making the agent could mount a file system without a bound.
            *("--unshare-user", "--disable-userns"),
            *(["--share-net"] if on_host else []),
            # On this command line alone: the agent does not see it, and other processes of the machine do.
            *("--setenv", LABEL, str(this_process()), "--setenv", _MARK, mark),
            *_shown([*_SHOWN, *_SHOWN_IN_ETC, *(_OF_NETWORK if on_host else ()), *self.config.readable]),
            *files,
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"),
            *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", spec.folder),
            *(part for folder in spec.folders for part in ("--size", size, "--tmpfs", folder)),
            *(part for path, source in spec.mounts.items() for part in ("--ro-bind", source, path)),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec.folder),
            *(_find_python(self.config), "-I", "-S", "-c", _START),
        ]


def _settings(spec: WorkspaceSpec) -> dict[str, Any]:
    """Return the settings of the supervisor."""
    environment = {
        "HOME": "/tmp/home",
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "TERM": "dumb",
        "USER": "agent",
        **spec.environment,
    }
    return {
        "folder": spec.folder,
        "writable": [spec.folder, *spec.folders, "/tmp", "/dev/shm"],
        "environment": environment,
        "memory_bytes": spec.limits.memory_mb * _MIB,
        "processes": spec.limits.processes,
    }


@frozen
class _Pipe:
    read: int
    write: int


@define(eq=False)
class _Descriptors:
    """Descriptors of a start, closed at its end."""

    passed: list[int] = field(factory=list)
    _own: list[int] = field(factory=list)

    def pipe(self) -> _Pipe:
        """Return a pipe whose end for writing is passed on."""
        read, write = os.pipe()
        self._own.append(read)
        self.passed.append(write)
        return _Pipe(read, write)

    def data(self, text: str) -> str:
        """Return a descriptor, as text, that is passed on and has a text to read."""
        fd = os.memfd_create("turnwise", os.MFD_CLOEXEC)
        self.passed.append(fd)
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return str(fd)

    def close_passed(self) -> None:
        """Close this process's copies of what was passed on."""
        while self.passed:
            os.close(self.passed.pop())

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_passed()
        for fd in self._own:
            os.close(fd)


def _shown(paths: Iterable[str]) -> list[str]:
    """Return the arguments that show paths: links as links, the others read-only, none that is missing."""
    found: list[str] = []
    for path in paths:
        if os.path.islink(path) and path in _SHOWN:
            found += ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            found += ("--ro-bind", path, path)
    return found


def _find_python(config: BubblewrapConfig) -> str:
    if config.python:
        return config.python
    candidates = [f"{sys.base_prefix}/bin/python3"] if sys.base_prefix.startswith("/usr") else []
    candidates += ["/usr/bin/python3", "/usr/local/bin/python3"]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise InfrastructureError(
        "there is no Python under /usr for the supervisor of a box; install python3, or set 'python' and 'readable'"
    )


def _find_uid() -> int | None:
    """Return a user id without an account if this process runs as root, which no limit of processes binds."""
    if os.geteuid() != 0:
        return None
    for _ in range(_NUM_UIDS):
        uid = _FIRST_UID + (os.getpid() * 7 + next(_numbers)) % _NUM_UIDS
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    raise InfrastructureError(f"every user id from {_FIRST_UID} on has an account; boxes need one without")


async def _kill_marked(mark: str) -> None:
    """Kill what is left of a start; bubblewrap's child does not die with it until it is told its user ids."""
    while found := [pid for pid, value in _values_on_command_lines(_MARK) if value == mark]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _find_orphans() -> list[tuple[int, Orphan]]:
    """Return the processes of boxes whose owner is gone; the system ends them with it, but for the first moment."""
    owners = [(pid, value, read_owner(value)) for pid, value in _values_on_command_lines(LABEL)]
    return [
        (pid, Orphan(name=f"process {pid}", owner=value))
        for pid, value, owner in owners
        if owner is not None and owner.is_gone
    ]


def _values_on_command_lines(name: str) -> list[tuple[int, str]]:
    """Return the processes that have a name among their arguments, each with the argument behind it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = folder.joinpath("cmdline").read_bytes().split(b"\0")
            value = arguments[arguments.index(name.encode()) + 1]
        except (OSError, ValueError, IndexError):  # it is gone, or no box
            continue
        found.append((int(folder.name), value.decode(errors="replace")))
    return found
