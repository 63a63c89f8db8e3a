"""Files that only their owner can read, since they have prompts, which may be confidential."""

from __future__ import annotations

import json
import os
from pathlib import Path

from turnwise.types import JsonObject


def append_private_line(path: Path, line: JsonObject) -> None:
    """Append a JSON line to a file, which is made if it is missing. Numbers that JSON has not are as in Python."""
    with open(path, "a", encoding="utf-8", opener=_open) as file:
        file.write(json.dumps(line) + "\n")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
