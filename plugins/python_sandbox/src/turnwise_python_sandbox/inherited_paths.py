"""Paths that a server reaches through inherited descriptors, because its user cannot enter their directories."""

from __future__ import annotations

import fcntl
import os
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
    _aliases: dict[str, str] = field(factory=dict)

    def make_reachable(self, path: str, uid: int | None) -> str:
        """Return the path itself if the user can reach it, otherwise a path through a descriptor."""
        if uid is None:
            return path
        check_enterable(path, uid)
        if find_blocking_directory(path, uid) is None:
            return path
        if path not in self._aliases:
            opened = os.open(path, os.O_PATH)
            try:
                fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
            finally:
                os.close(opened)
            self.fds.append(fd)
            self._aliases[path] = f"/proc/self/fd/{fd}"
        return self._aliases[path]

    def close(self) -> None:
        """Close the descriptors in this process."""
        for fd in self.fds:
            os.close(fd)
