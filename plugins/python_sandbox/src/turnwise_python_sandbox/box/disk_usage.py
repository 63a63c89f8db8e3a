"""Measures the files of a hostile program, without trusting anything in its directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

_BLOCK_BYTES: Final = 512
_MAX_REWRITES: Final = 16
"""A program may write this many times its quota before the written bytes count as its usage."""


class Usage(NamedTuple):
    """Bytes on disk and number of entries; counting stops when either is above its limit."""

    num_bytes: int
    num_files: int


def measure_usage(path: str, pid: int, max_bytes: int, max_files: int) -> Usage:
    """
    Return the disk usage of a program: its directory, and files that it deleted but keeps open.

    A directory that cannot be read, because it is too deep or closed, counts as too many files: it may hide any number.
    A program that moves its directories faster than they can be read is stopped by the number of bytes it has written.
    """
    sizes: dict[int, int] = {}
    num_files = 0
    try:
        for entry in _iterate_entries(path):
            num_files += 1
            # By inode, so that hard links count once.
            sizes[entry.st_ino] = entry.st_blocks * _BLOCK_BYTES
            if num_files > max_files:
                return Usage(sum(sizes.values()), num_files)
    except _UnreadableError:
        return Usage(sum(sizes.values()), max_files + 1)
    sizes |= _measure_deleted_files(path, pid)
    stored = sum(sizes.values())
    if stored > max_bytes:
        return Usage(stored, num_files)
    return Usage(max(stored, _count_written_bytes(pid) // _MAX_REWRITES), num_files)


class _UnreadableError(Exception):
    """A directory cannot be read."""


def _iterate_entries(path: str) -> Iterator[os.stat_result]:
    pending = [path]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    # The program is still running and may delete an entry before this reads it.
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _UnreadableError from error


def _count_written_bytes(pid: int) -> int:
    """Return the bytes that a process has written, less those it deleted before they reached the storage."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(f"/proc/{pid}/io") as file:
            counts = dict(line.split(": ") for line in file)
        return int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])
    return 0


def _measure_deleted_files(path: str, pid: int) -> dict[int, int]:
    """Return bytes by inode of the deleted files that a process has open on the file system of a path."""
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        device = os.stat(path).st_dev
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if found.st_dev == device and found.st_nlink == 0:
                    sizes[found.st_ino] = found.st_blocks * _BLOCK_BYTES
    return sizes
