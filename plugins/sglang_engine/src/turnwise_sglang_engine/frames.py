"""
Messages between the engine and SGLang's process: frames of a JSON head and arrays.

A frame is the length of its head and of its arrays in bytes (4 and 8, little endian), the head, and the arrays one
after the other. The head contains their dtypes and sizes. Received data is never executed.
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
DTYPES: dict[str, Any] = {"float32": np.float32, "int32": np.int32, "uint8": np.uint8}
"""Allowed dtypes of arrays."""
_LENGTHS = struct.Struct("<IQ")
_ARRAYS = "arrays"


@frozen(eq=False)
class Frame:
    """
    One message.

    Attributes:
        head: JSON values by name.
        arrays: one-dimensional arrays with a dtype of `DTYPES`.
    """

    head: dict[str, Any]
    arrays: Sequence[Array] = field(default=())


def pack(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    described = [(array.dtype.name, len(array)) for array in frame.arrays]
    head = json.dumps({**frame.head, _ARRAYS: described}, separators=(",", ":")).encode()
    num_bytes = sum(array.nbytes for array in frame.arrays)
    return b"".join([_LENGTHS.pack(len(head), num_bytes), head, *(array.tobytes() for array in frame.arrays)])


class Decoder:
    """Decodes frames from a byte stream."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete."""
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
        on_frame: called with each received frame.
        on_lost: called once, when the other end has closed the connection or `close` was called.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = Decoder()
        # Any, because SGLang's process uses uvloop, whose transports do not inherit from asyncio's.
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, head: dict[str, Any], *arrays: Array) -> None:
        """Send a frame. A lost connection is ignored here, because `on_lost` reports it."""
        if self._transport is not None:
            self._transport.write(pack(Frame(head, arrays)))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
