"""The last lines that a program prints to its standard error: a file would grow as long as it prints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO, Final, TextIO

from attrs import define, field

_KEPT_BYTES: Final = 4096
_NUM_LINES: Final = 3
_PART_BYTES: Final = 1 << 16
_MAX_PARTS: Final = 16
"""The pipe of a program that has ended holds less."""


@define(eq=False)
class LastLines(asyncio.Protocol):
    """
    Reads a pipe and keeps its end.

    Attributes:
        pipe: for the program, to write to.
    """

    pipe: TextIO
    _output: BinaryIO
    _end: bytearray = field(factory=bytearray, init=False)

    @classmethod
    @asynccontextmanager
    async def of_pipe(cls) -> AsyncIterator[LastLines]:
        """Read a new pipe inside the `async with` statement."""
        output, given = os.pipe()
        with os.fdopen(given, "w") as pipe, os.fdopen(output, "rb", buffering=0) as read_end:
            lines = cls(pipe, read_end)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: lines, read_end)
            try:
                yield lines
            finally:
                transport.close()  # a process that the program has left behind may hold the other end

    def data_received(self, data: bytes) -> None:
        """Keep the end of what has come."""
        self._end += data
        del self._end[:-_KEPT_BYTES]

    def read(self) -> list[str]:
        """Return the last lines that are not empty, the ones in the pipe included."""
        for _ in range(_MAX_PARTS):  # a process may go on to write
            try:
                data = self._output.read(_PART_BYTES)
            except BlockingIOError:
                break
            if not data:
                break
            self.data_received(data)
        lines = self._end.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-_NUM_LINES:]
