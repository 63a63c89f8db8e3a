"""Carries weights through Ray's object store: an object per bucket, which replicas of its node read without a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import ClassVar

from attrs import define, field

from turnwise.protocols.weights import Weight, WeightManifest, WeightSource, WeightTarget
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sources import source_of
from turnwise_weight_transports.buckets import ReceivedSource, allocate_zeros, read_buffers, store_buckets
from turnwise_weight_transports.config import BucketConfig

_ALONE_BYTES = 1 << 20
"""Size from which a weight has an object of Ray's store alone; putting an object costs less than copying this much."""


@define(eq=False)
class RayTransport:
    """The transport `ray`, for processes of one Ray cluster."""

    config: BucketConfig = field(factory=BucketConfig)
    lasting: ClassVar[bool] = True

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        # Ray frees the objects with their last reference, at this end or at a reader's.
        yield await finish_in_thread(partial(self._write, version, source_of(weights)))

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Let the engine copy from the store; `EngineError` when an object is damaged."""
        import ray

        buffers = await asyncio.to_thread(ray.get, manifest.locator["objects"])
        weights = await asyncio.to_thread(read_buffers, manifest.specs, manifest.locator, buffers)
        await engine.update_weights(ReceivedSource(manifest, lambda: weights), manifest.version)

    async def close(self) -> None:
        """Do nothing: no version outlives its context."""

    def _write(self, version: int, source: WeightSource) -> WeightManifest:
        import ray

        # Ray copies a weight that is alone in its bucket from its array to the store: a buffer would be a second copy.
        objects, layout = store_buckets(
            source, self.config, allocate_zeros, lambda _i, _b, buffer: ray.put(buffer), alone_bytes=_ALONE_BYTES
        )
        return WeightManifest(version=version, specs=source.specs, locator={"objects": objects, **layout})
