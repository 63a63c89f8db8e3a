"""
Packs weights into buckets of bounded size, and verifies and unpacks them at the other end.

A bucket is a layout, and its buffer is plain bytes, so shared memory, files, object stores and broadcasts share it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.protocols.weights import (
    StoredWeight,
    TensorSpec,
    Weight,
    WeightArray,
    WeightManifest,
    WeightSource,
    dtype_of,
)
from turnwise.weights.sources import as_numpy
from turnwise_weight_transports.config import BucketConfig, Checksum

Buffer = NDArray[np.uint8]
Stored = TypeVar("Stored")
_ALIGNMENT = 64


@frozen
class Bucket:
    """
    Weights that travel together.

    Attributes:
        entries: each weight with its byte offset in the buffer.
        num_bytes: size of the buffer, alignment gaps included.
    """

    entries: tuple[tuple[TensorSpec, int], ...]
    num_bytes: int


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int, alone_bytes: int | None = None) -> tuple[Bucket, ...]:
    """
    Assign weights to buckets, in order. Every process derives the same buckets from the same specs.

    Args:
        specs: of the weights.
        bucket_bytes: most bytes of a bucket; a larger weight has a bucket alone.
        alone_bytes: a weight of this size or more has a bucket alone; smaller ones share buckets of about this size.
    """
    buckets: list[Bucket] = []
    entries: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        is_alone = alone_bytes is not None and max(spec.num_bytes, end) >= alone_bytes
        if entries and (is_alone or start + spec.num_bytes > bucket_bytes):
            buckets.append(Bucket(tuple(entries), end))
            entries, start = [], 0
        entries.append((spec, start))
        end = start + spec.num_bytes
    if entries:
        buckets.append(Bucket(tuple(entries), end))
    return tuple(buckets)


def fill_buckets(
    buckets: Sequence[Bucket], source: WeightSource, allocate: Callable[[Bucket], Buffer], *, lend_alone: bool = False
) -> Iterator[tuple[Bucket, Buffer]]:
    """
    Copy a source into buffers, and yield each bucket once its buffer is full.

    Args:
        buckets: the plan of the source's specs.
        source: read once.
        allocate: returns a buffer of at least `num_bytes` bytes for a bucket.
        lend_alone: yield the array of a weight that is alone in its bucket itself, which is valid until the next one.

    Raises:
        EngineError: the source yields weights that its specs do not announce.
    """
    weights = iter(source)
    for bucket in buckets:
        if lend_alone and len(bucket.entries) == 1:
            array = as_numpy(next_array(weights, bucket.entries[0][0]))
            yield bucket, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            continue
        buffer = allocate(bucket)
        for spec, start in bucket.entries:
            write_array(next_array(weights, spec), spec, buffer[start : start + spec.num_bytes])
        yield bucket, buffer
    if (extra := next(weights, None)) is not None:
        raise EngineError(f"the source of weights yields {extra[0]!r}, which its specs do not announce")


def write_array(array: WeightArray, spec: TensorSpec, target: Buffer) -> None:
    """Write an array or tensor to memory of its size, with one copy, also from a device or with strides."""
    if isinstance(array, np.ndarray):
        target.view(array.dtype).reshape(array.shape)[...] = array
        return
    import torch

    if spec.num_bytes:
        torch.from_numpy(target).view(array.dtype).view(array.shape).copy_(array.detach())


def next_array(weights: Iterator[Weight], spec: TensorSpec) -> Any:
    """Read the next array of a source; `EngineError` when its name, shape or dtype differs from the spec."""
    name, array = next(weights, ("", None))
    if array is None:
        raise EngineError(f"the source of weights ends before {spec.name!r}, which its specs announce")
    found = TensorSpec(name, tuple(array.shape), str(array.dtype).removeprefix("torch."))
    if found != spec:
        raise EngineError(f"the source of weights yields {_describe(found)}, but its specs announce {_describe(spec)}")
    return array


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype} {list(spec.shape)}"


def unpack_bucket(bucket: Bucket, buffer: Buffer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a bucket as views of its buffer."""
    for spec, start in bucket.entries:
        flat = buffer[start : start + spec.num_bytes]
        yield spec.name, flat.view(dtype_of(spec.dtype)).reshape(spec.shape)


def allocate_zeros(bucket: Bucket) -> Buffer:
    """Return a buffer for a bucket. Zeros make the alignment gaps, which checksums cover, the same at both ends."""
    return np.zeros(bucket.num_bytes, np.uint8)


def store_buckets(
    source: WeightSource,
    config: BucketConfig,
    allocate: Callable[[Bucket], Buffer],
    store: Callable[[int, Bucket, Buffer], Stored],
    alone_bytes: int | None = None,
) -> tuple[list[Stored], dict[str, Any]]:
    """
    Pack a source and store it bucket by bucket.

    Args:
        source: read once.
        config: size of buckets, and their checksum.
        allocate: returns a buffer for a bucket.
        store: called with the index, the bucket and its full buffer.
        alone_bytes: a weight of this size or more has a bucket alone, and `store` copies its array: no buffer does.

    Returns:
        stored: results of `store`.
        layout: fields of the manifest that readers need to unpack and verify the buckets.
    """
    stored: list[Stored] = []
    checksums: list[int] = []
    buckets = plan_buckets(source.specs, config.bucket_bytes, alone_bytes)
    filled = fill_buckets(buckets, source, allocate, lend_alone=alone_bytes is not None)
    for index, (bucket, buffer) in enumerate(filled):
        checksums.append(compute_checksum(buffer, bucket, config.checksum))
        stored.append(store(index, bucket, buffer))
    layout = {"bucket_bytes": config.bucket_bytes, "alone_bytes": alone_bytes}
    return stored, {**layout, "checksum": config.checksum, "checksums": checksums}


def compute_checksum(buffer: Buffer, bucket: Bucket, kind: Checksum) -> int:
    """Return the checksum of a bucket's bytes; 0 for `none`."""
    if kind == "none":
        return 0
    content = memoryview(buffer)[: bucket.num_bytes]  # type: ignore[arg-type]  # numpy arrays are buffers
    if kind == "crc32":
        return zlib.crc32(content)
    import xxhash

    return xxhash.xxh3_64_intdigest(content)


def verify_checksum(buffer: Buffer, bucket: Bucket, kind: Checksum, published: int) -> None:
    """Raise `EngineError` when the checksum of a received bucket differs from the published one."""
    if compute_checksum(buffer, bucket, kind) != published:
        names = ", ".join(spec.name for spec, _start in bucket.entries[:2])
        raise EngineError(f"received weights are damaged: the {kind} checksum of the bucket with {names} differs")


def read_buffers(specs: Iterable[TensorSpec], layout: Mapping[str, Any], buffers: Sequence[Buffer]) -> list[Weight]:
    """
    Verify all buffers of a version, and return its weights as views of them.

    Args:
        specs: every weight, in order.
        layout: as `store_buckets` returned it.
        buffers: one per bucket, each at least as long as the bucket.

    Raises:
        EngineError: a buffer is missing, too short or damaged.
    """
    buckets = plan_buckets(specs, layout["bucket_bytes"], layout["alone_bytes"])
    if len(buffers) != len(buckets):
        raise EngineError(f"received weights are incomplete: {len(buffers)} of {len(buckets)} buckets")
    weights: list[Weight] = []
    for bucket, buffer, published in zip(buckets, buffers, layout["checksums"], strict=True):
        if len(buffer) < bucket.num_bytes:
            raise EngineError(f"received weights are incomplete: {len(buffer)} of {bucket.num_bytes} bytes of a bucket")
        verify_checksum(buffer, bucket, layout["checksum"], published)
        weights.extend(unpack_bucket(bucket, buffer))
    return weights


@frozen(eq=False)
class ReceivedSource:
    """
    The weights of a manifest at the reader's end, as the `WeightSource` that an engine reads.

    Attributes:
        manifest: announces the weights.
        receive: yields the weights, called for each iteration.
        stored: where the weights are, if they are in files: an engine may map them itself.
    """

    manifest: WeightManifest
    receive: Callable[[], Iterable[Weight]]
    stored: Sequence[StoredWeight] = ()

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.specs

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.receive())
