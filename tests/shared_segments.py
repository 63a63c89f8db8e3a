"""Segments of shared memory that processes of turnwise have left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def segments_of(pids: Iterable[int]) -> list[str]:
    """Return the segments that some processes have created; other processes of the machine use this memory too."""
    names = [path.name for path in Path("/dev/shm").glob("turnwise_*")]
    starts = tuple(f"turnwise_{pid}_" for pid in pids)
    return [name for name in names if name.startswith(starts)]
