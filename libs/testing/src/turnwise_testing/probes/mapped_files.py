"""How much of a file is in the memory of this process, because a part of the program maps it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(file: Path) -> int:
    """Return the bytes of all mappings of a file that are in memory, each page as often as it is mapped. Linux only."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            is_file = rest.endswith(str(file.resolve()))
        elif is_file and name == "Rss:":
            found += int(rest.split()[0]) << 10
    return found
