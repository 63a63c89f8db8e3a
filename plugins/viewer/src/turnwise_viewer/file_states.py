"""The states of a run's files, by which a page sees that they have changed."""

from __future__ import annotations

import os
from pathlib import Path

from turnwise_viewer.row_groups import list_steps

FileStates = tuple[tuple[str | int, ...], ...]
"""Name, device, inode, size and time of each file of a run."""


def read_states(source: Path | None) -> FileStates:
    """Return the state of the files of a run; empty if there are none."""
    if source is None:
        return ()
    try:
        files = list_steps(source) if source.is_dir() else [source]
        stats = [(file.name, os.stat(file)) for file in files]
    except FileNotFoundError:  # a writer gives a file its final name at this moment
        return ()
    return tuple((name, each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in stats)


def grew(before: FileStates, now: FileStates, *, is_stream: bool) -> bool:
    """Return whether the files before are still the same, so that only what is new must be read."""
    if is_stream:
        return bool(before) and before[0][:3] == now[0][:3]
    return bool(before) and now[: len(before)] == before
