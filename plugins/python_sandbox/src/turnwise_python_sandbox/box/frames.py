"""Frames on a byte stream: a four-byte big-endian length, then the payload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

HEADER_BYTES: Final = 4
MAX_PAYLOAD_BYTES: Final = 16 * 2**20


class FrameError(ValueError):
    """A frame is longer than allowed."""


def encode_frame(payload: bytes) -> bytes:
    """Return the payload with its header; raise `FrameError` if it is longer than `MAX_PAYLOAD_BYTES`."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"payload has {len(payload)} bytes, but a frame holds at most {MAX_PAYLOAD_BYTES}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameReader:
    """
    Splits a byte stream into payloads, wherever the stream was cut into chunks.

    Args:
        max_payload: longest payload, bytes.
    """

    def __init__(self, max_payload: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload = max_payload
        self._pending = bytearray()

    @property
    def num_pending(self) -> int:
        """Bytes that no payload has had yet."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """
        Add bytes and yield each complete payload.

        Raises:
            FrameError: a header announces a payload above the limit; the payload itself need not have arrived.
        """
        self._pending += data
        while len(self._pending) >= HEADER_BYTES:
            length = int.from_bytes(self._pending[:HEADER_BYTES], "big")
            if length > self._max_payload:
                raise FrameError(f"frame announces {length} bytes, but at most {self._max_payload} are allowed")
            if len(self._pending) < HEADER_BYTES + length:
                return
            payload = bytes(self._pending[HEADER_BYTES : HEADER_BYTES + length])
            del self._pending[: HEADER_BYTES + length]
            yield payload
