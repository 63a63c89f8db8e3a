"""
Messages between a box and its host.

A message is a header and a payload: both lengths as four bytes, big-endian, a JSON object, bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LENGTHS = struct.Struct(">II")
MAX_MESSAGE_BYTES = 2**30


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return a message."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


class Decoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes, and yield each complete message; `ValueError` for a length that no message has."""
        self._pending += data
        while len(self._pending) >= LENGTHS.size:
            header, payload = LENGTHS.unpack_from(self._pending)
            start, middle = LENGTHS.size, LENGTHS.size + header
            if header + payload > MAX_MESSAGE_BYTES:
                raise ValueError("a message is too long")
            if len(self._pending) < middle + payload:
                return
            text, body = bytes(self._pending[start:middle]), bytes(self._pending[middle : middle + payload])
            del self._pending[: middle + payload]
            yield json.loads(text), body
