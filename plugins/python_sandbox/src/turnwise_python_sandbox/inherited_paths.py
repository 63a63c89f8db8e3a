"""Paths that a server reaches through inherited descriptors, because its user cannot enter their directories."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from typing import Final

from attrs import define, field

from turnwise_python_sandbox.interpreter import check_enterable, find_blocking_directory

_FIRST_FD: Final = 200


@define
class InheritedPaths:
    """
    Opens paths and names them by descriptor.

    Attributes:
        fds: the descriptors to pass to the server.
    """

    fds: list[int] = field(factory=list)
    _by_path: dict[str, int] = field(factory=dict)

    def make_reachable(self, path: str, uid: int | None) -> str:
        """Return the path itself if the user can reach it, otherwise a path through a descriptor."""
        if uid is None:
            return path
        check_enterable(path, uid)
        if find_blocking_directory(path, uid) is None:
            return path
        if path not in self._by_path:
            opened = os.open(path, os.O_PATH)
            try:
                fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
            finally:
                os.close(opened)
            self.fds.append(fd)
            self._by_path[path] = fd
        return f"/proc/self/fd/{self._by_path[path]}"

    def fds_of(self, paths: Iterable[str]) -> list[int]:
        """Return the descriptors that these paths are reached through; none for paths that need none."""
        return [self._by_path[path] for path in paths if path in self._by_path]

    def close(self) -> None:
        """Close the descriptors in this process."""
        for fd in self.fds:
            os.close(fd)
