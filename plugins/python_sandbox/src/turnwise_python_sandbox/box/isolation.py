"""
The two ways in which a fork is confined; both end with Landlock, seccomp and rlimits.

`NamespaceIsolation` (tier 1) runs inside bubblewrap and gives each program pid, mount and ipc namespaces and a file
system in memory of its own. `PlainIsolation` (tier 2) needs no privilege, and gives each program a directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, Protocol

from turnwise_python_sandbox.box import kernel, workspace
from turnwise_python_sandbox.box.landlock import Grant
from turnwise_python_sandbox.box.messages import Launch

_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_MOVE_MOUNT: Final = 429
_SET_STRING: Final = 1
_CREATE: Final = 6
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8
_FROM_EMPTY_PATH: Final = 4
_AT_FDCWD: Final = -100
_CLOEXEC: Final = 1


class Place(Protocol):
    """Where one program lives, from before its fork until after its death."""

    path: str
    """Its working directory, as the program sees it."""

    def leave(self) -> None:
        """Undo, in the server, what concerned only the next fork."""

    def enter(self) -> None:
        """Move this process, the fork, in for good."""

    def over_quota(self, pid: int) -> bool:
        """Return whether a running program has more on disk than it may."""

    def disk_full(self) -> bool:
        """Return whether a program that has ended left no room."""

    def remove(self) -> int | None:
        """Take away everything that it left; return a child process that still does, when that may take long."""


class Isolation(Protocol):
    """Makes places; one object serves the whole life of a fork server."""

    def place(self, launch: Launch) -> Place:
        """Prepare a place; between this call and `Place.leave` nothing but the program may be forked."""

    def close(self) -> None:
        """Take away what was for all places, once every program has ended."""


class NamespaceIsolation:
    """
    Tier 1: needs CAP_SYS_ADMIN in the user namespace that bubblewrap made.

    Args:
        path: an empty directory of the box, where each program sees its own file system.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._own_namespace = os.pidfd_open(os.getpid())

    def place(self, launch: Launch) -> Place:
        """Make a file system in memory and a pid namespace that the next fork is born into."""
        return _NamespacePlace(self._path, self._own_namespace, launch)

    def close(self) -> None:
        """Leave it to the box, which ends with the server."""


class _NamespacePlace:
    def __init__(self, path: str, own_namespace: int, launch: Launch) -> None:
        self.path = path
        self._own_namespace = own_namespace
        self._files = _memory_files(launch.disk_bytes, launch.max_files)
        self._keeper = kernel.NamespaceKeeper()
        keeper = os.pidfd_open(self._keeper.pid)
        try:
            kernel.enter_pid_namespace(keeper)
        finally:
            os.close(keeper)

    def leave(self) -> None:
        kernel.enter_pid_namespace(self._own_namespace)

    def enter(self) -> None:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        kernel.syscall(_MOVE_MOUNT, self._files, b"", _AT_FDCWD, self.path.encode(), _FROM_EMPTY_PATH)
        kernel.drop_capabilities()

    def over_quota(self, pid: int) -> bool:
        return False  # the file system itself refuses

    def disk_full(self) -> bool:
        found = os.fstatvfs(self._files)
        return found.f_bavail == 0 or found.f_ffree == 0

    def remove(self) -> int | None:
        os.close(self._files)
        self._keeper.end()
        return None


def _memory_files(num_bytes: int, max_files: int) -> int:
    """Return a descriptor of a fresh tmpfs that is mounted nowhere yet."""
    context = kernel.syscall(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        # The root directory is a file too.
        for key, value in (("size", num_bytes), ("nr_inodes", max_files + 1), ("mode", "0700")):
            kernel.syscall(_FSCONFIG, context, _SET_STRING, key.encode(), str(value).encode(), 0)
        kernel.syscall(_FSCONFIG, context, _CREATE, None, None, 0)
        return kernel.syscall(_FSMOUNT, context, _CLOEXEC, _NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)


class PlainIsolation:
    """
    Tier 2: no privilege at all.

    Args:
        path: a directory that belongs to the server's user, for the programs' own.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def place(self, launch: Launch) -> Place:
        """Make a directory."""
        return _PlainPlace(f"{self._path}/{launch.job}", launch)

    def close(self) -> None:
        """Remove the directory: the supervisor may have been killed."""
        workspace.remove_tree(self._path)


class _PlainPlace:
    def __init__(self, path: str, launch: Launch) -> None:
        self.path = path
        self._launch = launch
        self._was_full = False
        os.mkdir(path, 0o700)

    def leave(self) -> None:
        pass

    def enter(self) -> None:
        # The server's death must not leave programs behind; seccomp keeps the program from changing this.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
        # Readable for the server, which must see the files that it deleted but has open.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    def over_quota(self, pid: int) -> bool:
        found = self._usage(pid)
        self._was_full = found.num_bytes > self._launch.disk_bytes or found.num_files > self._launch.max_files
        return self._was_full

    def disk_full(self) -> bool:
        found = self._usage(0)
        return self._was_full or found.num_bytes >= self._launch.disk_bytes or found.num_files >= self._launch.max_files

    def remove(self) -> int | None:
        try:
            os.rmdir(self.path)
        except OSError:
            return workspace.remove_elsewhere(self.path)
        return None

    def _usage(self, pid: int) -> workspace.Usage:
        return workspace.usage(self.path, pid, self._launch.disk_bytes, self._launch.max_files)


def open_grants(paths: Sequence[str], *, writable: bool) -> list[Grant]:
    """Open what a program may reach; paths that do not exist are left out."""
    found = []
    for path in paths:
        try:
            found.append(Grant(os.open(path, os.O_PATH | os.O_CLOEXEC), writable))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
                raise
    return found
