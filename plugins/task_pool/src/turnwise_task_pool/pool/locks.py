"""Files that one process alone may use, until it ends or is killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnwise.errors import ConfigError


@contextmanager
def only_user(path: Path, key: str) -> Iterator[None]:
    """
    Keep other processes from using a file inside the `with` statement.

    Args:
        path: of the file; the lock is on a file beside it, whose name ends with `.lock`.
        key: of the config, for the error.

    Raises:
        ConfigError: another process uses it.
    """
    lock = path.with_name(f"{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{key}: {path} is in use by another run; choose another file") from None
            if not _is_at(descriptor, lock):
                continue  # the last user has removed it between the two calls
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # while it is locked, so nobody else has it
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
