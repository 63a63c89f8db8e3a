"""Reads the files of a task's folder."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError, first_line

MAX_TASK_BYTES: Final = 32 * 2**20
"""Most bytes of the files of one task; larger ones belong into an image."""
_IGNORED: Final = frozenset({"__pycache__", ".DS_Store", ".git"})


def read_tree(folder: Path) -> dict[str, bytes]:
    """
    Return the contents of a folder's files by relative path, in order; of a missing folder, nothing.

    Raises:
        DataError: a file cannot be read, is a link or no file, or the files are too large.
    """
    found: dict[str, bytes] = {}
    size = 0
    for path in _walk(folder):
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: expected a regular file; put links and devices into an image")
        data = read_bytes(path)
        size += len(data)
        if size > MAX_TASK_BYTES:
            raise DataError(f"{folder}: has more than {MAX_TASK_BYTES // 2**20} MiB; put large files into an image")
        found[path.relative_to(folder).as_posix()] = data
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        # A link to a folder is listed among the folders.
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in _IGNORED and name not in links)
        for name in sorted([*names, *links]):
            if name not in _IGNORED:
                yield Path(place) / name


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; `DataError` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """Return the text of a file; `DataError` when it cannot be read, is not UTF-8 or empty."""
    try:
        text = read_bytes(path).decode().strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8") from error
    if not text:
        raise DataError(f"{path}: is empty")
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; `DataError` when it is none."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path}: {first_line(error)}") from error


def section(values: Mapping[str, object], name: str, path: Path) -> Mapping[str, Any]:
    """Return a table of a file, empty if it has none; `DataError` for another value."""
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: {name}: expected a table, got {found!r:.60}")
    return found


def seconds(values: Mapping[str, object], name: str, default: float, place: str) -> float:
    """Return a number of seconds above 0; `DataError` for another value."""
    found = values.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
        raise DataError(f"{place}.{name}: expected seconds above 0, got {found!r:.60}")
    return float(found)


def texts(values: Mapping[str, object], name: str, place: str) -> dict[str, str]:
    """Return a table of texts; `DataError` for another value, and for one that refers to this process's variables."""
    found = section(values, name, Path(place))
    for key, value in found.items():
        if not isinstance(value, str):
            raise DataError(f"{place}.{name}.{key}: expected a text, got {value!r:.60}")
        if "${" in value:
            raise DataError(f"{place}.{name}.{key}: no variable of this process reaches a workspace: {value!r:.60}")
    return dict(found)
