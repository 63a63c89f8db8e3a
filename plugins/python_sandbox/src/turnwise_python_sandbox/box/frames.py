"""Frames on a byte stream: four bytes of length, most significant first, then the payload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

HEADER_BYTES: Final = 4
MAX_PAYLOAD_BYTES: Final = 16 * 2**20


class FrameError(ValueError):
    """The stream announces a frame that is longer than allowed."""


def frame(payload: bytes) -> bytes:
    """Return the payload with its header; `FrameError` when it is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a frame holds at most {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameReader:
    """
    Cuts a stream into payloads, however its bytes were split on the way.

    Args:
        max_payload: longest payload, bytes; a header that announces more raises at once, before anything is kept.
    """

    def __init__(self, max_payload: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload = max_payload
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes and yield the payloads that are whole; `FrameError` as above."""
        self._pending += data
        while len(self._pending) >= HEADER_BYTES:
            length = int.from_bytes(self._pending[:HEADER_BYTES], "big")
            if length > self._max_payload:
                raise FrameError(f"a frame of {length} bytes; at most {self._max_payload} are allowed")
            if len(self._pending) < HEADER_BYTES + length:
                return
            payload = bytes(self._pending[HEADER_BYTES : HEADER_BYTES + length])
            del self._pending[: HEADER_BYTES + length]
            yield payload
