"""The processes of a box, as its first process sees them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

_PR_SET_DUMPABLE = 4
_KILL_S = 5.0


def other_pids() -> list[int]:
    """Return the processes of the box but for this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def signal_all(number: signal.Signals) -> None:
    """Send a signal to every process of the box but this one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def kill_all() -> None:
    """Kill every process of the box but this one."""
    end = time.monotonic() + _KILL_S  # one that waits for a device dies later
    while time.monotonic() < end:
        signal_all(signal.SIGKILL)
        if all(is_dead(pid) for pid in other_pids()):
            return
        time.sleep(0.001)


def fields_of(pid: int) -> list[str]:
    """Return the fields of a process's `stat` that follow its name; none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_dead(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    return fields_of(pid)[:1] in ([], ["Z"], ["X"])


def kill_tree(leader: int) -> None:
    """Kill the session that a process leads, and its descendants in other sessions."""
    for _ in range(100):
        facts = {pid: fields_of(pid) for pid in other_pids()}
        alive = {pid: fields for pid, fields in facts.items() if fields and fields[0] not in "ZX"}
        found = {pid for pid, fields in alive.items() if pid == leader or fields[3] == str(leader)}
        while True:
            more = {pid for pid, fields in alive.items() if int(fields[1]) in found} - found
            if not more:
                break
            found |= more
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    kill_all()  # they fork faster than they are found


def memory_of(pids: list[int]) -> int:
    """Return the bytes of memory that are not shared, and of the largest part that is."""
    own, shared = 0, 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                lines = dict(line.split(b":", 1) for line in file if line.startswith(b"Rss"))
        except OSError:
            continue
        own += read_kib(lines.get(b"RssAnon"))
        shared = max(shared, read_kib(lines.get(b"RssShmem")))
    return own + shared


def read_kib(text: bytes | None) -> int:
    """Return the bytes of a size such as `12 kB`."""
    return int(text.split()[0]) * 1024 if text else 0


def hide() -> None:
    """Let no process of this user trace this one or open its descriptors."""
    call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    if call(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
