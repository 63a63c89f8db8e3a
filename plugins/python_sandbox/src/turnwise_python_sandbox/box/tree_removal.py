"""
Removes directories that hostile programs have filled, without trusting anything in them.

As a program, it removes the directories that its standard input names, after its end or an empty name.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HIGHEST_DESCRIPTOR: Final = 2**20
_NAME_BYTES: Final = 16
_NUM_BYTES: Final = 1 << 16
_RETRIES: Final = 100
_RETRY_S: Final = 0.1


def remove_tree(path: str) -> None:
    """
    Remove a directory with all its contents, after its programs have exited; a missing directory is no error.

    The function moves each directory to the top before it empties it, so that depth needs no recursion and no long
    path. It changes modes that forbid the removal.

    Raises:
        OSError: something could not be removed, and is left.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(path)
        except OSError:
            _empty_directory(path)
            os.rmdir(path)


def remove_tree_in_child(path: str) -> int:
    """Remove a directory in a child process and return its id, because a hostile program may have filled it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, _HIGHEST_DESCRIPTOR)
            remove_tree(path)
        finally:
            os._exit(0)
    return pid


def _empty_directory(path: str) -> None:
    top = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.chmod(path, 0o700)
        # No program could know this name and put a directory in the way.
        prefix = f"..lifted-{os.urandom(_NAME_BYTES).hex()}-"
        num_lifted = 0
        names = _list_names(".", top)
        while names:
            name = names.pop()
            if _try_unlink(name, top):
                continue
            for inner in _list_names(name, top):
                if not _try_unlink(f"{name}/{inner}", top):
                    num_lifted += 1
                    # The kernel moves a directory only if it is writable, because the move changes its "..".
                    os.chmod(f"{name}/{inner}", 0o700, dir_fd=top)
                    os.rename(f"{name}/{inner}", f"{prefix}{num_lifted}", src_dir_fd=top, dst_dir_fd=top)
                    names.append(f"{prefix}{num_lifted}")
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _try_unlink(name: str, top: int) -> bool:
    """Remove a file or link and return True; return False for a directory."""
    try:
        os.unlink(name, dir_fd=top)
    except IsADirectoryError:
        return False
    return True


def _list_names(name: str, top: int) -> list[str]:
    if name != ".":
        os.chmod(name, 0o700, dir_fd=top)
    directory = os.open(name, _OPEN_DIRECTORY, dir_fd=top)
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)


def _remove_at_end_of_input() -> None:
    if os.fork():  # so that this process is no child of the one that started it
        return
    paths = b""
    while not paths.endswith(b"\0\0") and (data := os.read(0, _NUM_BYTES)):
        paths += data
    for path in map(os.fsdecode, filter(None, paths.split(b"\0"))):
        for _ in range(_RETRIES):  # a program that is about to die may create files meanwhile
            with contextlib.suppress(OSError):
                remove_tree(path)
                break
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    _remove_at_end_of_input()
