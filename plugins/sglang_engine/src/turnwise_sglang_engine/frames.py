"""
What travels between the engine and SGLang's process: a JSON head and arrays, one frame after the other.

A frame is the length of its head and of its arrays in bytes (4 and 8, little endian), the head, and the arrays one
after the other; the head says their dtypes and sizes. Nothing that is read is ever run.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

Array = NDArray[np.generic]
DTYPES: dict[str, Any] = {"float32": np.float32, "int32": np.int32}
"""What arrays may be of."""
_LENGTHS = struct.Struct("<IQ")
_ARRAYS = "arrays"


@frozen(eq=False)
class Frame:
    """
    One message.

    Attributes:
        head: JSON values by name.
        arrays: one-dimensional, of the dtypes above.
    """

    head: dict[str, Any]
    arrays: Sequence[Array] = field(default=())


def pack(frame: Frame) -> bytes:
    """Return a frame's bytes."""
    described = [(array.dtype.name, len(array)) for array in frame.arrays]
    head = json.dumps({**frame.head, _ARRAYS: described}, separators=(",", ":")).encode()
    num_bytes = sum(array.nbytes for array in frame.arrays)
    return b"".join([_LENGTHS.pack(len(head), num_bytes), head, *(array.tobytes() for array in frame.arrays)])


class Decoder:
    """Makes frames of bytes that come in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes."""
        self._rest += data
        while len(self._rest) >= _LENGTHS.size:
            head_size, num_bytes = _LENGTHS.unpack_from(self._rest)
            body = _LENGTHS.size + head_size
            if len(self._rest) < body + num_bytes:
                return
            head = json.loads(bytes(self._rest[_LENGTHS.size : body]))
            payload = bytes(self._rest[body : body + num_bytes])
            del self._rest[: body + num_bytes]
            yield Frame(head, tuple(_split(payload, head.pop(_ARRAYS))))


def _split(payload: bytes, described: list[tuple[str, int]]) -> Iterator[Array]:
    offset = 0
    for name, size in described:
        dtype = np.dtype(DTYPES[name])
        yield np.frombuffer(payload, dtype, size, offset)
        offset += size * dtype.itemsize


class Link(asyncio.Protocol):
    """
    One end of the connection.

    Args:
        on_frame: called with each frame that comes.
        on_lost: called once, when the other end has gone or `close` was called.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = Decoder()
        # Of uvloop in one process: its transports are not asyncio's by inheritance.
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on what is complete."""
        for frame in self._decoder.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        self._transport = None
        self._on_lost()

    def send(self, head: dict[str, Any], *arrays: Array) -> None:
        """Send a frame; nothing happens when the other end has gone, which `on_lost` tells."""
        if self._transport is not None:
            self._transport.write(pack(Frame(head, arrays)))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()
