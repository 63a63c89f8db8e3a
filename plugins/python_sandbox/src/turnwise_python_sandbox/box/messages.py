"""
What the supervisor and the fork server say to each other: one JSON array per datagram, and open files beside it.

Neither code nor output is ever in a message: the server must not hold what a later program could find in its memory.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple, cast

MAX_BYTES: Final = 65536
"""Longest datagram either side takes."""


class Launch(NamedTuple):
    """
    Start a program; its files come beside it: code, standard input, output, errors.

    Attributes:
        job: number that the answers carry.
        wall_s: seconds until it is killed.
        cpu_s: processor seconds, of all threads together.
        memory_bytes: address space beyond what the interpreter has already.
        disk_bytes: of all its files together.
        max_files: files and directories that it may have.
        session: the code comes in frames on a stream (see `frames`), in place of one file.
    """

    job: int
    wall_s: float
    cpu_s: int
    memory_bytes: int
    disk_bytes: int
    max_files: int
    session: bool


class Signal(NamedTuple):
    """Send a signal to a program; one that has ended is ignored."""

    job: int
    number: int


class Ready(NamedTuple):
    """The server is up: its Landlock ABI, and the modules of the preload list that it could not import."""

    landlock_abi: int
    missing: tuple[str, ...]


class Began(NamedTuple):
    """A program is confined and its code is about to run."""

    job: int


class Ended(NamedTuple):
    """
    A program is gone, and so is all that it left.

    Attributes:
        job: the number it was launched with.
        wait_status: as `os.waitpid` gave it; -1 when it never came to be.
        cause: why the server killed it: "wall", "disk", "asked", or "" when it did not.
        disk_full: its files had no room left at the end.
        wall_s: from fork to the end.
        cpu_s: user and system time.
        max_rss_kb: peak resident memory, KiB.
        error: why it never came to be.
    """

    job: int
    wait_status: int
    cause: str
    disk_full: bool
    wall_s: float
    cpu_s: float
    max_rss_kb: int
    error: str


Message = Launch | Signal | Ready | Began | Ended
_KINDS: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in (Launch, Signal, Ready, Began, Ended)}
_FIELDS: Final = {
    "job": int,
    "number": int,
    "wait_status": int,
    "landlock_abi": int,
    "cpu_s": (int, float),
    "wall_s": (int, float),
    "memory_bytes": int,
    "disk_bytes": int,
    "max_files": int,
    "max_rss_kb": int,
    "session": bool,
    "disk_full": bool,
    "cause": str,
    "error": str,
    "missing": tuple,
}


class GarbageError(ValueError):
    """The other side sent something that is no message."""


def encode(message: Message) -> bytes:
    """Return the datagram of a message."""
    return json.dumps([type(message).__name__, *message]).encode()


def decode(datagram: bytes) -> Message:
    """Return the message of a datagram; `GarbageError` for anything else."""
    try:
        kind, *values = json.loads(datagram)
        message_type = _KINDS[kind]
        fields = [tuple(each) if isinstance(each, list) else each for each in values]
        message: Message = cast("Any", message_type)(*fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GarbageError(f"{datagram[:80]!r}: {error}") from error
    for name, value in zip(message_type._fields, message, strict=True):
        _check(name, value)
    return message


def _check(name: str, value: Any) -> None:
    expected = _FIELDS[name]
    fits = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))  # type: ignore[arg-type]
    if fits and isinstance(value, float):
        fits = math.isfinite(value)
    if fits and isinstance(value, tuple):
        fits = all(isinstance(each, str) for each in value)
    if not fits:
        raise GarbageError(f"{name} cannot be {value!r}")
