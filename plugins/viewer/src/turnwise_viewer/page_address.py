"""
The port and the token of a live page, kept so that an open page finds the server again after a restart.

They are kept for `turnwise view --live` alone, and every other start has a new token. While the server is down, an open
page sends its token to any program that listens at the free port.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from turnwise.files import expanded


@frozen
class PageAddress:
    """
    Attributes:
        port: on loopback.
        token: the first part of every path.
    """

    port: int
    token: str


def address_file(runs: Sequence[Path]) -> Path:
    """Return the file for a view of some runs, below `$XDG_STATE_HOME` or `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    name = hashlib.sha256("\n".join(str(run.resolve()) for run in runs).encode()).hexdigest()[:32]
    return expanded(state) / "turnwise" / "view" / f"{name}.json"


def load_address(file: Path) -> PageAddress | None:
    """Return the kept address; None if there is none, or if others could have read or written it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, encoding="utf-8") as stream:
        state = os.fstat(descriptor)
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            return None
        try:
            values = json.load(stream)
            address = PageAddress(int(values["port"]), str(values["token"]))
        except (ValueError, KeyError, TypeError):
            return None  # a machine that went down left half a file
    return address if 0 < address.port <= 65535 and len(address.token) > 24 and address.token.isascii() else None


def save_address(file: Path, address: PageAddress) -> None:
    """Keep an address in a file that only its owner reads; `OSError` if it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        json.dump({"port": address.port, "token": address.token}, stream)
    os.replace(partial, file)
