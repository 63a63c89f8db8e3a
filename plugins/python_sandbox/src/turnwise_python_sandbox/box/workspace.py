"""Directories that hostile programs have filled: measured and removed without trusting anything in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES: Final = 512
_HIGHEST_DESCRIPTOR: Final = 2**20
_REWRITES: Final = 16
"""How many times over an honest program may write what it may keep."""


class Usage(NamedTuple):
    """Bytes on disk and number of entries; counting stops once either is over its limit."""

    num_bytes: int
    num_files: int


def usage(path: str, pid: int, max_bytes: int, max_files: int) -> Usage:
    """
    Return what a program keeps on disk: what its directory holds, and files that it deleted but has open.

    What cannot be looked at, because it is too deep or closed, counts as too many files: it would hide any number.
    A program that moves its directories about faster than they can be read is still stopped by what it has written.
    """
    sizes: dict[int, int] = {}
    num_files = 0
    try:
        for entry in _entries(path):
            num_files += 1
            sizes[entry.st_ino] = entry.st_blocks * _BLOCK_BYTES
            if num_files > max_files:
                return Usage(sum(sizes.values()), num_files)
    except _HiddenError:
        return Usage(sum(sizes.values()), max_files + 1)
    sizes |= _open_files(path, pid)
    kept = sum(sizes.values())
    return Usage(max(kept, _written(pid) // _REWRITES), num_files) if kept <= max_bytes else Usage(kept, num_files)


class _HiddenError(Exception):
    """A directory cannot be looked into."""


def _entries(path: str) -> Iterator[os.stat_result]:
    pending = [path]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    # The program runs on: what is gone when it is looked at does not count.
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _HiddenError from error


def _written(pid: int) -> int:
    """Return the bytes that a process has written to storage, less those it took back before they got there."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(f"/proc/{pid}/io") as file:
            counts = dict(line.split(": ") for line in file)
        return int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])
    return 0


def _open_files(path: str, pid: int) -> dict[int, int]:
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        device = os.stat(path).st_dev
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if found.st_dev == device and found.st_nlink == 0:
                    sizes[found.st_ino] = found.st_blocks * _BLOCK_BYTES
    return sizes


def remove_tree(path: str) -> None:
    """
    Remove a directory whose programs have ended, whatever is in it.

    Directories are lifted to the top before they are emptied, so depth costs no stack and no long path; modes that
    forbid it are changed. What cannot be removed is left, and `OSError` says so.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(path)
        except OSError:
            _empty(path)
            os.rmdir(path)


def remove_elsewhere(path: str) -> int:
    """Remove a directory in a child process and return its id: a hostile program's may hold very much."""
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, _HIGHEST_DESCRIPTOR)
            remove_tree(path)
        finally:
            os._exit(0)
    return pid


def _empty(path: str) -> None:
    top = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.chmod(path, 0o700)
        lifted = 0
        names = _list(".", top)
        while names:
            name = names.pop()
            if _unlinked(name, top):
                continue
            for inner in _list(name, top):
                if not _unlinked(f"{name}/{inner}", top):
                    lifted += 1
                    # A directory moves only when it may be written itself: its ".." changes.
                    os.chmod(f"{name}/{inner}", 0o700, dir_fd=top)
                    os.rename(f"{name}/{inner}", f"..lifted{lifted}", src_dir_fd=top, dst_dir_fd=top)
                    names.append(f"..lifted{lifted}")
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _unlinked(name: str, top: int) -> bool:
    """Remove a file or link and return True; False for a directory."""
    try:
        os.unlink(name, dir_fd=top)
    except IsADirectoryError:
        return False
    return True


def _list(name: str, top: int) -> list[str]:
    if name != ".":
        os.chmod(name, 0o700, dir_fd=top)
    directory = os.open(name, _OPEN_DIRECTORY, dir_fd=top)
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)
