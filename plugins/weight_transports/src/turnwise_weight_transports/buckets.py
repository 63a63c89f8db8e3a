"""
Weights in pieces of bounded size: which weight lies where, how a piece is filled, checked and read.

A piece is bytes, so the same plan serves shared memory, object stores and broadcasts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.weight_sources import as_numpy
from turnwise.weights import Offer, TensorSpec, Weight, WeightSource, dtype_of
from turnwise_weight_transports.config import Checksum

Bytes = NDArray[np.uint8]
_ALIGNMENT = 64


@frozen
class Bucket:
    """
    One piece.

    Attributes:
        entries: each weight with the byte that it starts at.
        num_bytes: size of the piece, gaps included.
    """

    entries: tuple[tuple[TensorSpec, int], ...]
    num_bytes: int


def buckets_of(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the pieces of some weights, in their order; every process derives the same from the same specs."""
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


def fill(buckets: Sequence[Bucket], source: WeightSource, room: Callable[[Bucket], Bytes]) -> Iterator[Bytes]:
    """
    Write a source piece by piece, and yield each piece when it is whole.

    Args:
        buckets: of the source's specs.
        source: read once.
        room: returns at least `num_bytes` bytes for a piece.

    Raises:
        EngineError: the source does not hold what its specs say.
    """
    weights = iter(source)
    for bucket in buckets:
        piece = room(bucket)
        for spec, start in bucket.entries:
            array = expected(weights, spec)
            flat = np.ascontiguousarray(as_numpy(array)).reshape(-1).view(np.uint8)
            piece[start : start + spec.num_bytes] = flat
        yield piece


def expected(weights: Iterator[Weight], spec: TensorSpec) -> Any:
    """Return the next array of a source; `EngineError` when it is another than the source said."""
    name, array = next(weights, ("nothing", np.empty(0)))
    if name != spec.name or tuple(array.shape) != spec.shape:
        raise EngineError(f"the source of weights gave {name!r} in place of {spec.name!r} {spec.shape}")
    return array


def read(bucket: Bucket, piece: Bytes) -> Iterator[Weight]:
    """Yield the weights of a piece as views of it."""
    for spec, start in bucket.entries:
        flat = piece[start : start + spec.num_bytes]
        yield spec.name, flat.view(dtype_of(spec.dtype)).reshape(spec.shape)


def checksum_of(piece: Bytes, bucket: Bucket, kind: Checksum) -> int:
    """Return the checksum of a piece's weights; 0 when there is none."""
    if kind == "none":
        return 0
    content = memoryview(piece)[: bucket.num_bytes]  # type: ignore[arg-type]  # numpy arrays are buffers
    if kind == "crc32":
        return zlib.crc32(content)
    import xxhash

    return xxhash.xxh3_64_intdigest(content)


def check(piece: Bytes, bucket: Bucket, kind: Checksum, published: int) -> None:
    """Raise `EngineError` when a piece is not what was published."""
    if checksum_of(piece, bucket, kind) != published:
        names = ", ".join(spec.name for spec, _start in bucket.entries[:2])
        raise EngineError(f"weights arrived damaged: the {kind} checksum of the piece with {names} differs")


@frozen(eq=False)
class PiecesSource:
    """
    A `WeightSource` of pieces that are all there, checked before the first is handed out.

    Attributes:
        offer: what they are.
        buckets: how they lie.
        pieces: one for each bucket.
    """

    offer: Offer
    buckets: tuple[Bucket, ...]
    pieces: Sequence[Bytes]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight."""
        return self.offer.specs

    def __iter__(self) -> Iterator[Weight]:
        """Yield each weight as a view of its piece."""
        for bucket, piece in zip(self.buckets, self.pieces, strict=True):
            yield from read(bucket, piece)


def checked(offer: Offer, pieces: Sequence[Bytes]) -> PiecesSource:
    """Return pieces as a source; `EngineError` when one is missing or damaged."""
    place: Mapping[str, Any] = offer.place
    buckets = buckets_of(offer.specs, place["bucket_bytes"])
    if len(pieces) != len(buckets):
        raise EngineError(f"weights arrived incomplete: {len(pieces)} of {len(buckets)} pieces")
    for bucket, piece, published in zip(buckets, pieces, place["checksums"], strict=True):
        if len(piece) < bucket.num_bytes:
            raise EngineError(f"weights arrived incomplete: a piece has {len(piece)} of {bucket.num_bytes} bytes")
        check(piece, bucket, place["checksum"], published)
    return PiecesSource(offer, buckets, pieces)
