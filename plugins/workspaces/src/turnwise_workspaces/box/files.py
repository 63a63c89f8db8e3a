"""Reads and writes files, in a child of the supervisor that has the agent's limits."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

_CHUNK = 2**16


def use_file(header: dict[str, Any], payload: bytes) -> int:
    """Read or write a file, in a child process: the agent names the path, which may be of a process or a device."""
    try:
        if header["do"] == "write":
            write_file(header["path"], payload)
        else:
            read_file(header["path"], header["offset"], header["max_bytes"])
    except (OSError, ValueError) as error:
        write_all(2, (getattr(error, "strerror", None) or str(error)).encode(errors="replace"))
        return 1
    return 0


def write_file(path: str, payload: bytes) -> None:
    """Write a regular file, and make its folders."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666), "wb") as file:
        check_regular(file.fileno())
        file.truncate(0)
        file.write(payload)


def read_file(path: str, offset: int, max_bytes: int) -> None:
    """Write a part of a regular file to the standard output."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        check_regular(file.fileno())
        file.seek(offset)
        while max_bytes > 0 and (data := file.read(min(max_bytes, _CHUNK))):
            max_bytes -= len(data)
            write_all(1, data)


def check_regular(fd: int) -> None:
    """Raise `OSError` for what is no regular file."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a descriptor that blocks."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
