"""
Copies of new weights for workers on other machines, which cannot open the files of the replica's machine.

On each other machine one worker, the holder, keeps a copy of every file in memory. The other workers of that machine
open the holder's files.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from attrs import define, field

from turnwise_engine_support.stored_weights import Place

CHUNK_BYTES = 16 << 20
"""Bytes of a file that one call carries."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")

Paths = Mapping[str, Mapping[str, str]]
"""For each other machine the paths of the copies, by the path of the file."""


def machine_id() -> str:
    """Return the same text for processes that can open each other's files, and another one on another machine."""
    # A container has its own process ids, by which the files are opened.
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_PIDS.readlink()}"
    except OSError:
        return socket.gethostname()


@define(eq=False)
class Copies:
    """The files that a holder keeps, by the path of their original."""

    _files: dict[str, IO[bytes]] = field(factory=dict, init=False)

    def write(self, path: str, offset: int, data: bytes) -> str:
        """Write a part of a file, and return the path of its copy."""
        if path not in self._files:
            # Without a name, so nothing stays behind if this process is killed.
            self._files[path] = os.fdopen(os.memfd_create("turnwise-weights", os.MFD_CLOEXEC), "wb", buffering=0)
        descriptor, written = self._files[path].fileno(), 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def close(self) -> None:
        """Free the files. Idempotent."""
        while self._files:
            self._files.popitem()[1].close()


def choose_holders(machines: Sequence[str], own: str) -> dict[int, str]:
    """Return the rank of the first worker on each machine but the own one, from the machines of all workers."""
    holders: dict[str, int] = {}
    for rank, machine in enumerate(machines):
        holders.setdefault(machine, rank)
    return {rank: machine for machine, rank in holders.items() if machine != own}


async def copy_files(
    places: Iterable[Place], holders: Mapping[int, str], call: Callable[..., Awaitable[Sequence[Any]]]
) -> Paths:
    """
    Copy the files of weights to the holders, and return the paths of the copies.

    Args:
        places: of the weights.
        holders: machine of each holder, by its rank.
        call: vLLM's `collective_rpc`.
    """
    paths: dict[str, dict[str, str]] = {machine: {} for machine in holders.values()}
    for path in dict.fromkeys(place[3] for place in places) if holders else ():
        offset = 0
        while data := await asyncio.to_thread(_read, path, offset):
            written = await call("turnwise_copy", args=(list(holders), path, offset, data))
            offset += len(data)
            for rank, machine in holders.items():
                paths[machine][path] = written[rank]
    return paths


def _read(path: str, offset: int) -> bytes:
    with Path(path).open("rb") as file:
        return os.pread(file.fileno(), CHUNK_BYTES, offset)


def local_places(places: Iterable[Place], paths: Mapping[str, str]) -> list[Place]:
    """Return places with the paths of this machine's copies."""
    return [(name, dtype, shape, paths.get(path, path), offset) for name, dtype, shape, path, offset in places]
