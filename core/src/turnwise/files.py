"""
Files and folders that appear whole or not at all, also when the process or the machine dies.

A write goes to a temporary name beside the target. Its content is flushed to the disk before the name changes, and the
folder is flushed after: without the first a crash can leave an empty file under the final name, without the second the
old name can come back.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from turnwise.errors import ConfigError

PARTIAL: Final = ".partial"
"""Suffix of the temporary name."""


def partial_path(path: Path) -> Path:
    """Return the temporary name of a file that is being written."""
    return path.with_name(f"{path.name}{PARTIAL}")


def expanded(path: str | Path) -> Path:
    """Return a path with the home directory in place of `~` or `~USER`; `ConfigError` if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {Path(path).parts[0]} has no home directory on this machine") from error


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """
    Write a file whole or not at all.

    Args:
        path: the file; an existing one is replaced, missing parent folders are created.

    Yields:
        The temporary path to write to. When the block raises, the file is removed and the target stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    try:
        yield partial
        replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: Path, finish: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """
    Write a folder whole or not at all.

    Args:
        folder: its parents must exist: a removed folder of a run would come back with a part of the run.
        finish: gives the temporary folder its name; None is `replace`, for which there is no such folder yet.

    Yields:
        The temporary folder, which is empty. When the block raises, it is removed.
    """
    partial = partial_path(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        (finish or replace)(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def make_parents(path: Path) -> None:
    """Make the folders above a path; `OSError` unless a file can be made there."""
    parent = path.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    check_writable(parent)


def raise_disk_error(error: BaseException) -> None:
    """Raise the `OSError` behind an error of safetensors, which names the system's error in its text alone."""
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise `OSError` unless a file can be made in a folder."""
    with TemporaryFile(dir=folder):
        pass


def replace(source: Path, target: Path) -> None:
    """Give a complete file or folder its final name, with its content on the disk first; a file replaces a file."""
    _flush_tree(source)
    os.replace(source, target)
    flush(target.parent)


def share_weights(folder: Path) -> None:
    """Give the weights in a folder the mode of new files; safetensors writes them for the eyes of their owner alone."""
    probe = partial_path(folder / "mode")
    probe.touch()  # its mode follows the umask, which cannot be read without changing it for all threads
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def flush(path: Path) -> None:
    """Flush one file's content, or one folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot flush a folder; its files are flushed all the same.
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_tree(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _flush_tree(inner)
    if not path.is_symlink():
        flush(path)
