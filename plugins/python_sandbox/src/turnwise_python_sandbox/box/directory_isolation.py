"""Tier 2: each program has a directory, whose size the server polls; needs no privilege."""

from __future__ import annotations

import os
import signal
from typing import Final

from turnwise_python_sandbox.box import disk_usage, kernel, tree_removal
from turnwise_python_sandbox.box.isolation import Workspace
from turnwise_python_sandbox.box.messages import Launch

_NAME_BYTES: Final = 16


class DirectoryIsolation:
    """
    Creates a directory per program, with a name that no program can guess.

    Args:
        path: parent of these directories; the server's user owns it, and may not list it.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def create_workspace(self, launch: Launch) -> Workspace:
        # The programs of a server have one user, so only the name keeps them out of each other's directories.
        return _DirectoryWorkspace(f"{self._path}/{os.urandom(_NAME_BYTES).hex()}", launch)

    def close(self) -> None:
        # The supervisor removes the directory too, unless it has been killed.
        tree_removal.remove_tree(self._path)


class _DirectoryWorkspace:
    def __init__(self, path: str, launch: Launch) -> None:
        self.path = path
        self._launch = launch
        self._exceeded = False
        os.mkdir(path, 0o700)

    def restore_server(self) -> None:
        pass

    def enter(self) -> None:
        # The program must not outlive the server; seccomp keeps the program from changing this.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # The server reads /proc/PID/fd of the program to find files that it deleted but keeps open.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    def exceeds_quota(self, pid: int) -> bool:
        found = self._measure(pid)
        self._exceeded = found.num_bytes > self._launch.disk_bytes or found.num_files > self._launch.max_files
        return self._exceeded

    def is_full(self) -> bool:
        found = self._measure(0)
        limits = self._launch
        return self._exceeded or found.num_bytes >= limits.disk_bytes or found.num_files >= limits.max_files

    def remove(self) -> int | None:
        try:
            os.rmdir(self.path)
        except OSError:
            return tree_removal.remove_tree_in_child(self.path)
        return None

    def _measure(self, pid: int) -> disk_usage.Usage:
        return disk_usage.measure_usage(self.path, pid, self._launch.disk_bytes, self._launch.max_files)
