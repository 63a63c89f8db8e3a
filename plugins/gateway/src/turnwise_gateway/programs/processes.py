"""Reads which processes there are, which of them a program has started, and which of them has a socket; Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from attrs import frozen

from turnwise_gateway.programs.orphans import read_marks

_ENDED: Final = (FileNotFoundError, ProcessLookupError)
_ROOTS: Final = (0, 1)


@frozen
class Process:
    """
    A process.

    Attributes:
        parent: its id; 1 or a keeper of orphans when the one that started it has ended.
        session: id of the process that began its session; no process can join the session of another program.
        started: clock ticks from the start of the machine to its own; an id may come again, but not with this number.
        is_zombie: it has ended, and its parent does not know yet.
    """

    parent: int
    session: int
    started: int
    is_zombie: bool


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may have spaces and brackets
    except _ENDED:
        return None
    return Process(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"))


def list_processes() -> dict[int, Process]:
    """Return all processes by their ids."""
    return {pid: process for pid in _list_ids() if (process := read_process(pid)) is not None}


def find_session(leader: int) -> Iterator[int]:
    """Yield the processes of the session that a program began with: no file is read, so this takes little time."""
    for pid in _list_ids():
        try:
            if os.getsid(pid) == leader:
                yield pid
        except OSError:  # it has ended
            continue


def _list_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def find_tree(processes: Mapping[int, Process], leader: int, mark: str) -> Iterator[int]:
    """
    Yield the descendants of a program and the processes of its session, and then the processes that it has left behind.

    A process that it has left behind has the mark of the program in its environment. Other programs can read and copy
    that, so the process is none of this program if one with another mark has started it.

    Args:
        processes: all of them.
        leader: id of the program's first process.
        mark: of the program.
    """
    inside = {**dict.fromkeys(_ROOTS, False), leader: True}
    for pid in processes:
        if _is_inside(pid, processes, leader, inside):
            yield pid
    marks = {mark.encode()}
    for pid in processes:
        if inside[pid] or marks != set(read_marks(pid)):
            continue
        if all(set(read_marks(each)) <= marks for each in _climb(pid, processes)):
            yield pid


def _is_inside(pid: int, processes: Mapping[int, Process], leader: int, inside: dict[int, bool]) -> bool:
    """Return whether a process descends from the leader, or is in its session; `inside` has earlier answers."""
    path = []
    while pid not in inside:
        path.append(pid)
        process = processes.get(pid)
        inside[pid] = process is not None and process.session == leader
        if process is None or inside[pid]:
            break
        pid = process.parent  # ids that came again may close a circle, which ends above
    for each in path:
        inside[each] = inside[pid]
    return inside[path[0] if path else pid]


def _climb(pid: int, processes: Mapping[int, Process]) -> Iterator[int]:
    seen = set()
    while pid in processes and pid not in seen:
        seen.add(pid)
        yield pid
        pid = processes[pid].parent


def find_owners(pids: Iterable[int], inodes: Iterable[int]) -> dict[int, int]:
    """
    Return the processes of sockets.

    Args:
        pids: of the processes to look at, in this order, until all sockets are found.
        inodes: of the sockets.

    Raises:
        PermissionError: this process may not see the files of one of them.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for pid in pids:
        for name in _list_files(pid):
            if (inode := wanted.pop(name, None)) is not None:
                found[inode] = pid
        if not wanted:
            break
    return found


def _list_files(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process are; nothing once it has ended."""
    folder = f"/proc/{pid}/fd"
    try:
        for descriptor in os.listdir(folder):
            try:
                yield os.readlink(f"{folder}/{descriptor}")
            except FileNotFoundError:  # it was closed
                continue
    except _ENDED:
        return
    except PermissionError:
        process = read_process(pid)
        if process is not None and not process.is_zombie:
            raise
