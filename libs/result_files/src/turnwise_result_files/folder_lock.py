"""The folder that a command writes to: it is made and locked, and errors of the disk are one line."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError, DataError
from turnwise.files import check_writable

_DISK_ERRORS: Final = frozenset(
    {
        *(errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM),
        *(errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    }
)


def check_replaceable(out: Path, files: Sequence[Path], config: str) -> None:
    """
    Refuse to replace files that no run wrote: a run never lacks its config, and none of its files is a folder.

    Args:
        out: the folder.
        files: that a run would replace.
        config: name of the config that a run writes first.

    Raises:
        ConfigError: one of them is not a run's.
    """
    for file in files:
        if file.is_dir() or not (out / config).is_file():
            reason = "is a folder" if file.is_dir() else f"no run wrote it, because there is no {config}"
            raise ConfigError(f"--out {out}: {file.relative_to(out)} stays: {reason}; choose another folder")


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
    """
    Make the folder of `--out` if it is missing.

    Raises:
        ConfigError: that is impossible, no file can be made in it, or it is a folder of much else: `/`, the home
            directory, or the root of a git repository. A run's files would mix with others', or replace them.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_writable(out)
        place = out.resolve()
        is_home = place == Path("~").expanduser().resolve()
    except (OSError, RuntimeError) as error:  # the latter without a home directory, or in a circle of links
        raise ConfigError(f"--out {out}: {error.strerror if isinstance(error, OSError) else error}") from error
    kinds = (("the root of the file system", place == Path("/")), ("the home directory", is_home))
    for kind, applies in (*kinds, ("the root of a git repository", (place / ".git").exists())):
        if applies:
            raise ConfigError(f"--out {out}: is {kind}; name a folder in it, such as {place / 'runs' / 'first'}")


def removed_folder(out: Path) -> DataError:
    """Return the error for a folder that was removed during a run."""
    return DataError(f"{out}: was removed while the run wrote to it; start the run again")


@contextmanager
def writing_to(out: Path, hint: str) -> Iterator[None]:
    """
    Keep other runs out of a folder, and report a full or read-only disk in one line.

    Args:
        out: the folder.
        hint: last part of the report: how to continue.

    Raises:
        ConfigError: another process holds the folder.
        DataError: the disk refuses what the block writes, or the folder was removed.
    """
    try:
        with lock_folder(out):
            check_writable(out)  # now, because the first file may be written hours later
            yield
    except FolderLockedError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        if not out.is_dir():
            raise removed_folder(out) from error
        if error.errno not in _DISK_ERRORS:
            raise
        raise DataError(f"{out}: cannot be written: {error.strerror}; {hint}") from error
