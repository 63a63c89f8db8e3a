"""The lock of a folder: one run at a time writes to it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderLockedError(Exception):
    """Another process writes to a folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """
    Hold a folder for the life of the block, so that one run at a time writes to it; a killed process lets it go.

    Raises:
        FolderLockedError: another process holds the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderLockedError(f"{folder}: another run writes to this folder") from None
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(descriptor)
