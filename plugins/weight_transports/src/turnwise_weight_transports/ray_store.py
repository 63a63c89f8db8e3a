"""Through Ray's object store: a piece is an object, which replicas of the same node read without a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import numpy as np
from attrs import define, field

from turnwise.weight_sources import source_of
from turnwise.weights import Offer, Weight, WeightSource, WeightTarget
from turnwise_weight_transports.buckets import Bucket, Bytes, buckets_of, checked, checksum_of, fill
from turnwise_weight_transports.config import BucketConfig


@define(eq=False)
class RayTransport:
    """The transport `ray`. Both ends are processes of one Ray cluster."""

    config: BucketConfig = field(factory=BucketConfig)

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Put the weights into the store; they are freed when the context and the last reader let go of them."""
        yield await asyncio.to_thread(self._put, version, source_of(weights))

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Let the engine copy from the store."""
        import ray

        pieces = await asyncio.to_thread(ray.get, offer.place["objects"])
        source = await asyncio.to_thread(checked, offer, pieces)
        await engine.update_weights(source, offer.version)

    async def close(self) -> None:
        """Do nothing: no version outlives its context."""

    def _put(self, version: int, source: WeightSource) -> Offer:
        import ray

        specs, config = source.specs, self.config
        buckets = buckets_of(specs, config.bucket_bytes)
        objects, checksums = [], []
        for bucket, piece in zip(buckets, fill(buckets, source, _room), strict=True):
            checksums.append(checksum_of(piece, bucket, config.checksum))
            objects.append(ray.put(piece))
        place = {
            "objects": objects,
            "bucket_bytes": config.bucket_bytes,
            "checksum": config.checksum,
            "checksums": checksums,
        }
        return Offer(version=version, specs=specs, place=place)


def _room(bucket: Bucket) -> Bytes:
    return np.empty(bucket.num_bytes, np.uint8)
