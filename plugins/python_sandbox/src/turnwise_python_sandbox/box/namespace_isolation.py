"""Tier 1: each program has pid, mount and ipc namespaces and an in-memory file system; runs inside bubblewrap."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from turnwise_python_sandbox.box import kernel
from turnwise_python_sandbox.box.isolation import Workspace
from turnwise_python_sandbox.box.messages import Launch

_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_SET_STRING: Final = 1
_CREATE: Final = 6
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8
_FROM_EMPTY_PATH: Final = 4
_AT_FDCWD: Final = -100
_CLOEXEC: Final = 1


class NamespaceIsolation:
    """
    Creates workspaces in namespaces; needs CAP_SYS_ADMIN in the user namespace that bubblewrap created.

    Args:
        path: an empty directory of the box; each program sees its own file system there.
        devices: devices of the box. On a read-only mount programs may write to a device, and not change its times.
    """

    def __init__(self, path: str, devices: Sequence[str]) -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        for device in devices:
            kernel.make_read_only(device)
        self._path = path
        self._own_namespace = os.pidfd_open(os.getpid())

    def create_workspace(self, launch: Launch) -> Workspace:
        return _NamespaceWorkspace(self._path, self._own_namespace, launch)

    def close(self) -> None:
        """Do nothing: the box and its files end with the server."""


class _NamespaceWorkspace:
    def __init__(self, path: str, own_namespace: int, launch: Launch) -> None:
        self.path = path
        self._own_namespace = own_namespace
        self._tmpfs = _create_tmpfs(launch.disk_bytes, launch.max_files)
        self._init = kernel.NamespaceInit()
        init = os.pidfd_open(self._init.pid)
        try:
            kernel.enter_pid_namespace(init)
        finally:
            os.close(init)

    def restore_server(self) -> None:
        kernel.enter_pid_namespace(self._own_namespace)

    def enter(self) -> None:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        kernel.syscall(_MOVE_MOUNT, self._tmpfs, b"", _AT_FDCWD, self.path.encode(), _FROM_EMPTY_PATH)
        kernel.drop_capabilities()

    def exceeds_quota(self, pid: int) -> bool:
        return False  # the file system itself refuses to grow

    def is_full(self) -> bool:
        found = os.fstatvfs(self._tmpfs)
        return found.f_bavail == 0 or found.f_ffree == 0

    def remove(self) -> int | None:
        os.close(self._tmpfs)
        self._init.kill()
        return None


def _create_tmpfs(num_bytes: int, max_files: int) -> int:
    """Return a descriptor of a new tmpfs that is not mounted yet."""
    context = kernel.syscall(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        # The root directory needs an inode too.
        for key, value in (("size", num_bytes), ("nr_inodes", max_files + 1), ("mode", "0700")):
            kernel.syscall(_FSCONFIG, context, _SET_STRING, key.encode(), str(value).encode(), 0)
        kernel.syscall(_FSCONFIG, context, _CREATE, None, None, 0)
        return kernel.syscall(_FSMOUNT, context, _CLOEXEC, _NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)
