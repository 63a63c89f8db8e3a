"""The file by which agents find a control port."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnwise.types import JsonObject


@contextmanager
def announced(path: Path, access: JsonObject) -> Iterator[None]:
    """Keep address and secret of a control port in a file that only its owner can read, inside the `with` statement."""
    write_private(path, json.dumps(access))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        partial.replace(path)
    except BaseException:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise
