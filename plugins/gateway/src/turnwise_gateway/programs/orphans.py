"""
Ends processes that agents leave behind, in the group of their program or outside of it.

Each program has a mark in its environment, which its children inherit. Run as a program, with a mark as its argument,
this file waits until the process at the other end of its input dies, and then ends the processes with that mark. It
needs the standard library alone, so that it starts in some milliseconds. Processes are found on Linux only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

VARIABLE = "TURNWISE_AGENT"
"""The variable with the mark: name of the worker, a dot, and the name of the program."""
_PREFIX = VARIABLE.encode() + b"="
_MAX_ROUNDS = 100
_START_TRIES, _START_S = 20, 0.001
"""Looks at the environment of a process that starts, and seconds between them."""


def kill_marked(marks: Collection[str]) -> int:
    """
    Kill all processes with one of the marks, or with a mark of a worker, and return their number.

    Args:
        marks: of programs, or names of workers.
    """
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # a process may start another one before it is killed
        found = _find_marked(frozenset(mark.encode() for mark in marks)) - {os.getpid()}
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if found <= killed:
            break
        killed |= found
    return len(killed)


def _find_marked(marks: frozenset[bytes]) -> set[int]:
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdecimal():
            continue
        if any(mark in marks or mark.partition(b".")[0] in marks for mark in read_marks(int(name))):
            found.add(int(name))
    return found


def read_marks(pid: int) -> list[bytes]:
    """Return the marks in the environment of a process; none if it has ended, or belongs to another user."""
    try:
        variables = _environment_of(f"/proc/{pid}").split(b"\0")
    except OSError:
        return []
    return [each.removeprefix(_PREFIX) for each in variables if each.startswith(_PREFIX)]


def _environment_of(folder: str) -> bytes:
    """
    Return the environment of a process, from its folder in /proc.

    It is empty for a moment while the process starts, also after the call that started it has returned.
    """
    for _ in range(_START_TRIES):
        with open(f"{folder}/environ", "rb", buffering=0) as file:
            if found := file.read():
                return found
        os.readlink(f"{folder}/exe")  # fails for a process that has ended, and for one of the kernel
        time.sleep(_START_S)
    return b""


if __name__ == "__main__":
    # A fork goes on. It is no child of the worker, because Ray kills the children of an actor together with it.
    if os.fork() == 0 and sys.stdin.buffer.read() == b"":  # at a good end, there is a byte
        kill_marked(sys.argv[1:])
