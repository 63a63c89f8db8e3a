"""
Messages between the supervisor and a fork server: one JSON array per datagram, with open files passed beside it.

No message holds code or output, because a later program could find them in the memory of its server.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple, cast

MAX_DATAGRAM_BYTES: Final = 65536
"""Longest datagram that either side receives."""


class Launch(NamedTuple):
    """
    Start a program. Four files come with this message: code, standard input, standard output, standard error.

    Attributes:
        job_id: repeated in every reply about this program.
        wall_s: seconds until the server kills the program.
        cpu_s: processor seconds of all threads together.
        memory_bytes: address space in addition to the interpreter's own.
        disk_bytes: limit for all files together.
        max_files: limit for the number of files and directories.
        session: the code arrives in frames on a stream (see `frames`) instead of in one file.
    """

    job_id: int
    wall_s: float
    cpu_s: int
    memory_bytes: int
    disk_bytes: int
    max_files: int
    session: bool


class Signal(NamedTuple):
    """Send a signal to a program; ignored if the program has exited."""

    job_id: int
    number: int


class Ready(NamedTuple):
    """The server accepts launches. Reports its Landlock ABI and the preload modules that it could not import."""

    landlock_abi: int
    missing: tuple[str, ...]


class Started(NamedTuple):
    """
    A program is confined and is about to run its code.

    Attributes:
        job_id: from its `Launch`.
        warm_rss_kb: resident memory that it has from the warm interpreter, KiB.
    """

    job_id: int
    warm_rss_kb: int


class Exited(NamedTuple):
    """
    A program has exited and its files are removed.

    Attributes:
        job_id: from its `Launch`.
        wait_status: from `os.waitpid`; -1 if the server could not start the program.
        cause: why the server killed it: "wall", "disk" or "asked"; "" if the server did not.
        disk_full: its files had reached their limit.
        wall_s: seconds from fork to exit.
        cpu_s: user and system time.
        max_rss_kb: peak resident memory, KiB.
        error: why the server could not start the program.
    """

    job_id: int
    wait_status: int
    cause: str
    disk_full: bool
    wall_s: float
    cpu_s: float
    max_rss_kb: int
    error: str


Message = Launch | Signal | Ready | Started | Exited
_KINDS: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in (Launch, Signal, Ready, Started, Exited)}
_FIELD_TYPES: Final = {
    "job_id": int,
    "number": int,
    "wait_status": int,
    "landlock_abi": int,
    "cpu_s": (int, float),
    "wall_s": (int, float),
    "memory_bytes": int,
    "disk_bytes": int,
    "max_files": int,
    "max_rss_kb": int,
    "warm_rss_kb": int,
    "session": bool,
    "disk_full": bool,
    "cause": str,
    "error": str,
    "missing": tuple,
}


class MessageError(ValueError):
    """A datagram is not a valid message."""


def encode(message: Message) -> bytes:
    """Return the datagram of a message."""
    return json.dumps([type(message).__name__, *message]).encode()


def decode(datagram: bytes) -> Message:
    """Return the message in a datagram; raise `MessageError` for anything else."""
    try:
        kind, *values = json.loads(datagram)
        message_type = _KINDS[kind]
        fields = [tuple(each) if isinstance(each, list) else each for each in values]
        message: Message = cast("Any", message_type)(*fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageError(f"invalid message {datagram[:80]!r}: {error}") from error
    for name, value in zip(message_type._fields, message, strict=True):
        _check_field(name, value)
    return message


def _check_field(name: str, value: object) -> None:
    expected = _FIELD_TYPES[name]
    # bool is a subclass of int, but True is no number of bytes.
    fits = isinstance(value, expected)  # type: ignore[arg-type]  # a type, or a union of types
    fits = fits and (expected is bool or not isinstance(value, bool))
    if fits and isinstance(value, float):
        fits = math.isfinite(value)
    if fits and isinstance(value, tuple):
        fits = all(isinstance(each, str) for each in value)
    if not fits:
        raise MessageError(f"invalid message: {name} is {value!r}")
