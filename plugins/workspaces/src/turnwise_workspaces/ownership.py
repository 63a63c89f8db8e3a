"""Labels of the process that owns a workspace; they tell whether it still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from attrs import frozen

LABEL: Final = "turnwise-workspace"
"""Key of the label, on the command lines of boxes and among the labels of containers."""
_START_TIME: Final = 19
"""Place of a process's start time among the fields of its `stat` that follow the name."""


def start_time_of(pid: int) -> str:
    """Return the start of a process in clock ticks since the boot of the machine; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_TIME]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@frozen
class Owner:
    """
    A process that owns workspaces.

    Attributes:
        host: name of its machine.
        boot: id of the machine's boot.
        pid: its process id.
        started: its start in clock ticks, because process ids are used again.
    """

    host: str
    boot: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"{self.host}/{self.boot}/{self.pid}/{self.started}"

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this machine and no longer does; a process of another machine is never gone."""
        if self.host != socket.gethostname():
            return False
        return self.boot != _boot_id() or start_time_of(self.pid) != self.started


def this_process() -> Owner:
    """Return the label of this process."""
    pid = os.getpid()
    return Owner(host=socket.gethostname(), boot=_boot_id(), pid=pid, started=start_time_of(pid))


def read_owner(text: str) -> Owner | None:
    """Return the owner that a label names; None for a text that is no label."""
    parts = text.split("/")
    if len(parts) != len(Owner.__attrs_attrs__) or not parts[2].isdecimal():
        return None
    return Owner(host=parts[0], boot=parts[1], pid=int(parts[2]), started=parts[3])
