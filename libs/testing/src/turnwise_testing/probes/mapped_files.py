"""How much of a file is in the memory of this process, because a part of the program maps it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(file: Path) -> int:
    """Return the bytes of all mappings of a file that are in memory, each page as often as it is mapped. Linux only."""
    import psutil  # the packages whose tests call this need it too

    return sum(each.rss for each in psutil.Process().memory_maps(grouped=False) if each.path == str(file.resolve()))
