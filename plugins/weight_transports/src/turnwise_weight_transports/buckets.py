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
from turnwise.protocols.weights import TensorSpec, Weight, WeightManifest, WeightSource, dtype_of
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


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Assign weights to buckets, in order. Every process derives the same buckets from the same specs."""
    buckets: list[Bucket] = []
    entries: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if entries and start + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(entries), end))
            entries, start = [], 0
        entries.append((spec, start))
        end = start + spec.num_bytes
    if entries:
        buckets.append(Bucket(tuple(entries), end))
    return tuple(buckets)


def fill_buckets(
    buckets: Sequence[Bucket], source: WeightSource, allocate: Callable[[Bucket], Buffer]
) -> Iterator[tuple[Bucket, Buffer]]:
    """
    Copy a source into buffers, and yield each bucket once its buffer is full.

    Args:
        buckets: the plan of the source's specs.
        source: read once.
        allocate: returns a buffer of at least `num_bytes` bytes for a bucket.

    Raises:
        EngineError: the source yields weights that its specs do not announce.
    """
    weights = iter(source)
    for bucket in buckets:
        buffer = allocate(bucket)
        for spec, start in bucket.entries:
            array = as_numpy(next_array(weights, spec))
            buffer[start : start + spec.num_bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        yield bucket, buffer
    if (extra := next(weights, None)) is not None:
        raise EngineError(f"the source of weights yields {extra[0]!r}, which its specs do not announce")


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
) -> tuple[list[Stored], dict[str, Any]]:
    """
    Pack a source and store it bucket by bucket.

    Args:
        source: read once.
        config: size of buckets, and their checksum.
        allocate: returns a buffer for a bucket.
        store: called with the index, the bucket and its full buffer.

    Returns:
        stored: results of `store`.
        layout: fields of the manifest that readers need to unpack and verify the buckets.
    """
    stored: list[Stored] = []
    checksums: list[int] = []
    buckets = plan_buckets(source.specs, config.bucket_bytes)
    for index, (bucket, buffer) in enumerate(fill_buckets(buckets, source, allocate)):
        checksums.append(compute_checksum(buffer, bucket, config.checksum))
        stored.append(store(index, bucket, buffer))
    return stored, {"bucket_bytes": config.bucket_bytes, "checksum": config.checksum, "checksums": checksums}


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
    buckets = plan_buckets(specs, layout["bucket_bytes"])
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
    """

    manifest: WeightManifest
    receive: Callable[[], Iterable[Weight]]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.specs

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.receive())
