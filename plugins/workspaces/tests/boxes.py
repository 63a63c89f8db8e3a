"""What the tests of boxes share: the processes of a backend on this machine, and whether there can be any."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from functools import cache
from pathlib import Path

from turnwise import Resources
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig
from turnwise_workspaces.ownership import LABEL, this_process


def list_boxes(owner: str = "") -> list[str]:
    """Return the processes that hold boxes of an owner, of this process by default."""
    wanted = [LABEL.encode(), (owner or str(this_process())).encode()]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(arguments[index : index + 2] == wanted for index in range(len(arguments))):
            found.append(f"process {path.parent.name}")
    return found


def list_orphans() -> list[str]:
    """Return the processes that hold boxes of processes that are gone."""
    backend = BubblewrapBackend(BubblewrapConfig(), Resources())
    return [orphan.name for orphan in asyncio.run(backend.find_orphans())]


@cache
def why_no_boxes() -> str:
    """Return why this machine cannot make boxes; empty if it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip()
