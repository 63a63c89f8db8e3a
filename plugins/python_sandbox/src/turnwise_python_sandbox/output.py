"""The output of a program: the pipes that it prints to, and the bytes that are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from attrs import define, field

READ_BYTES: Final = 65536


@define(eq=False)
class CapturedOutput:
    """
    The output of a program, up to a limit for both streams together.

    Attributes:
        limit: bytes to keep.
        truncated: the program printed more than the limit.
    """

    limit: int
    truncated: bool = False
    _streams: dict[str, bytearray] = field(factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})

    @property
    def size(self) -> int:
        """Bytes kept so far."""
        return sum(map(len, self._streams.values()))

    def add(self, stream: str, data: bytes) -> None:
        """Keep the data up to the limit."""
        room = self.limit - self.size
        self.truncated = self.truncated or len(data) > room
        self._streams[stream] += data[:room]

    def text(self, stream: str) -> str:
        """Return a stream as text; bytes that are not UTF-8, or were cut inside a character, are replaced."""
        return self._streams[stream].decode("utf-8", "replace")


@define(eq=False)
class OutputPipes:
    """The read ends of a program's output pipes, by descriptor."""

    _streams: dict[int, str] = field(factory=dict)

    def open(self) -> list[int]:
        """Create the pipes and return their write ends, standard output first; the caller closes these."""
        write_ends: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                read_end, write_end = os.pipe()
                self._streams[read_end] = stream
                write_ends.append(write_end)
                os.set_blocking(read_end, False)
        except BaseException:
            self.close()
            for fd in write_ends:
                os.close(fd)
            raise
        return write_ends

    def __iter__(self) -> Iterator[int]:
        return iter(self._streams)

    def __contains__(self, fd: object) -> bool:
        return fd in self._streams

    def read(self, fd: int, output: CapturedOutput) -> bool:
        """Add the bytes that a pipe holds now; return False at its end."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        output.add(self._streams[fd], data)
        return bool(data)

    def drain(self, output: CapturedOutput) -> None:
        """Add the bytes that are left in the pipes, until the output is at its limit."""
        for fd in self._streams:
            while not output.truncated:
                before = output.size
                self.read(fd, output)
                if output.size == before:
                    break

    def close_fd(self, fd: int) -> None:
        """Close one pipe."""
        del self._streams[fd]
        os.close(fd)

    def close(self) -> None:
        """Close all pipes. Idempotent."""
        while self._streams:
            os.close(self._streams.popitem()[0])
