"""
Carries weights through shared memory of one host: a segment per bucket, which every replica maps without a copy.

The publisher's resource tracker, a separate process, unlinks the segments also when the publisher is killed. Readers
map segments untracked, because the tracker of a reader that dies would unlink them under the other readers.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import StoredWeight, Weight, WeightManifest, WeightSource, WeightTarget
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sources import source_of
from turnwise_weight_transports.buckets import Bucket, Buffer, ReceivedSource, plan_buckets, read_buffers, store_buckets
from turnwise_weight_transports.config import BucketConfig

_FOLDER = Path("/dev/shm")
"""The folder in which Linux shows shared memory."""


@define(eq=False)
class SharedMemoryTransport:
    """The transport `shm`."""

    config: BucketConfig = field(factory=BucketConfig)
    lasting: ClassVar[bool] = True

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        segments: list[SharedMemory] = []
        try:
            yield await finish_in_thread(partial(self._write, version, source_of(weights), segments))
        finally:
            # A reader that still maps a segment keeps its memory until it unmaps it.
            for segment in segments:
                with suppress(FileNotFoundError):
                    segment.unlink()

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Let the engine copy from the mapped segments; `EngineError` when one is missing or damaged."""
        weights = await asyncio.to_thread(_read, manifest)
        await engine.update_weights(ReceivedSource(manifest, lambda: weights, _locate(manifest)), manifest.version)

    async def close(self) -> None:
        """Do nothing: no version outlives its context."""

    def _write(self, version: int, source: WeightSource, segments: list[SharedMemory]) -> WeightManifest:
        def allocate(bucket: Bucket) -> Buffer:
            return _create_segment(max(1, bucket.num_bytes), segments)  # a segment cannot be empty

        names, layout = store_buckets(source, self.config, allocate, lambda *_: segments[-1].name)
        return WeightManifest(version=version, specs=source.specs, locator={"segments": names, **layout})


def _create_segment(num_bytes: int, segments: list[SharedMemory]) -> Buffer:
    """Create a segment, append it to `segments`, and return its memory."""
    try:
        # The name says whose memory it is, and 30 characters are the most on some systems.
        name = f"turnwise_{os.getpid()}_{token_hex(5)}"
        segments.append(SharedMemory(name, create=True, size=num_bytes))
        # The segment's own map cannot be closed while an array views it; a map of ours is closed with the array.
        segments[-1].close()
        descriptor = os.open(_FOLDER / segments[-1].name, os.O_RDWR)
        try:
            # Without a reservation the system runs out of memory at a write, and kills the trainer with SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EngineError(
            f"cannot write {num_bytes} bytes of weights to {_FOLDER}: {error.strerror}; enlarge it, or set"
            " weight_transport to another transport"
        ) from error


def _read(manifest: WeightManifest) -> list[Weight]:
    return read_buffers(manifest.specs, manifest.locator, [_map_segment(name) for name in manifest.locator["segments"]])


def _locate(manifest: WeightManifest) -> list[StoredWeight]:
    buckets = plan_buckets(manifest.specs, manifest.locator["bucket_bytes"], manifest.locator["alone_bytes"])
    paths = [str(_FOLDER / Path(name).name) for name in manifest.locator["segments"]]
    places = [(path, entry) for path, bucket in zip(paths, buckets, strict=True) for entry in bucket.entries]
    return [StoredWeight(spec, path, start) for path, (spec, start) in places]


def _map_segment(name: str) -> Buffer:
    """Return the bytes of a segment, read-only. `SharedMemory` would register it with this process's tracker."""
    try:
        descriptor = os.open(_FOLDER / Path(name).name, os.O_RDONLY)
    except OSError as error:
        raise EngineError(
            f"cannot read weights from {_FOLDER}: {error.strerror}; the transport shm reaches processes of one Linux"
            " host only"
        ) from error
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)
