"""
Through shared memory of one host: a segment for each piece, mapped by every replica and copied by none but its engine.

The publisher's resource tracker, a process of its own, unlinks the segments also when the publisher is killed. Readers
map them without being tracked: a reader that dies leaves nothing to unlink, and must not take them from the others.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.weight_sources import source_of
from turnwise.weights import Offer, Weight, WeightSource, WeightTarget
from turnwise_weight_transports.buckets import Bucket, Bytes, PiecesSource, buckets_of, checked, checksum_of, fill
from turnwise_weight_transports.config import BucketConfig

_FOLDER = Path("/dev/shm")
"""Where Linux shows shared memory."""


@define(eq=False)
class SharedMemoryTransport:
    """The transport `shm`."""

    config: BucketConfig = field(factory=BucketConfig)
    _open: list[SharedMemory] = field(factory=list, init=False)

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Copy the weights into shared memory; leaving the context unlinks it. Readers that still map it keep it."""
        segments: list[SharedMemory] = []
        try:
            yield await asyncio.to_thread(self._write, version, source_of(weights), segments)
        finally:
            _free(segments)

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Let the engine copy from the mapped segments; `EngineError` when they are gone or damaged."""
        source = await asyncio.to_thread(_read, offer)
        await engine.update_weights(source, offer.version)

    async def close(self) -> None:
        """Do nothing: no version outlives its context."""

    def _write(self, version: int, source: WeightSource, segments: list[SharedMemory]) -> Offer:
        specs, config = source.specs, self.config
        buckets = buckets_of(specs, config.bucket_bytes)

        def room(bucket: Bucket) -> Bytes:
            segments.append(SharedMemory(create=True, size=max(1, bucket.num_bytes)))
            # Its own map cannot be closed while an array looks into it; a second map goes when the array does.
            segments[-1].close()
            return _mapped(segments[-1].name, writable=True)

        pieces = zip(buckets, fill(buckets, source, room), strict=True)
        checksums = [checksum_of(piece, bucket, config.checksum) for bucket, piece in pieces]
        place = {
            "segments": [segment.name for segment in segments],
            "bucket_bytes": config.bucket_bytes,
            "checksum": config.checksum,
            "checksums": checksums,
        }
        return Offer(version=version, specs=specs, place=place)


def _free(segments: list[SharedMemory]) -> None:
    while segments:
        segment = segments.pop()
        with suppress(FileNotFoundError):
            segment.unlink()


def _read(offer: Offer) -> PiecesSource:
    return checked(offer, [_mapped(name) for name in offer.place["segments"]])


def _mapped(name: str, *, writable: bool = False) -> Bytes:
    """Return the bytes of a segment, without letting this process's tracker know of it."""
    path = _FOLDER / Path(name).name
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        text = f"cannot read weights from shared memory: {error.strerror}; the transport shm serves one Linux host"
        raise EngineError(text) from error
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=protection), np.uint8)
    finally:
        os.close(descriptor)
