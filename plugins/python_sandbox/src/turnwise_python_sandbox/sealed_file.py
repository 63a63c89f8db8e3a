"""Files that carry code and input to a program, and that no process can change."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile


def create_sealed_file(content: bytes) -> int:
    """Return a descriptor, at offset 0, of a nameless file; on Linux no process can change it."""
    if sys.platform != "linux":
        return _create_unlinked_file(content)
    fd = os.memfd_create("turnwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_all(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_unlinked_file(content: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        return os.dup(file.fileno())


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
