"""The folder that a command writes to: it is made and locked, and errors of the disk are one line."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError, DataError

_DISK_ERRORS: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM, errno.EROFS}
)


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


def make_folder(out: Path) -> None:
    """Make the folder of `--out` if it is missing; `ConfigError` if that is impossible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def removed_folder(out: Path) -> DataError:
    """Return the error for a folder that was removed during a run."""
    return DataError(f"{out}: was removed while the run wrote to it; start the run again")


@contextmanager
def writing_to(out: Path, remedy: str) -> Iterator[None]:
    """
    Keep other runs out of a folder, and report a full or read-only disk in one line.

    Args:
        out: the folder.
        remedy: last part of the report: how to continue.

    Raises:
        ConfigError: another process holds the folder.
        DataError: the disk refuses what the block writes, or the folder was removed.
    """
    try:
        with lock_folder(out):
            yield
    except FolderLockedError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        if not out.is_dir():
            raise removed_folder(out) from error
        if error.errno not in _DISK_ERRORS:
            raise
        raise DataError(f"{out}: cannot be written: {error.strerror}; {remedy}") from error
