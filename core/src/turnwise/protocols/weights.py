"""
Weights on their way from a trainer to engines: what a source of them is, and the contract of transports.

An update is a stream of (name, array) pairs. Names are those of the Hugging Face state dict; an array is a numpy array,
with bfloat16 as `ml_dtypes.bfloat16`, or a torch tensor where a transport delivers on the device. Nothing here imports
a tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen

Weight = tuple[str, Any]
"""A name of the state dict and its array."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of a name such as `float32` or `bfloat16`; `ValueError` for an unknown one."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        name = getattr(ml_dtypes, name, name)
    try:
        return np.dtype(name)
    except TypeError:
        raise ValueError(f"unknown dtype {name!r} of a weight") from None


@frozen
class TensorSpec:
    """
    One weight without its numbers.

    Attributes:
        name: in the state dict.
        shape: its axes.
        dtype: numpy's name of it, or `bfloat16`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """How much it takes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@runtime_checkable
class WeightSource(Protocol):
    """Weights that say beforehand what they are. Iterating again begins anew."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight, in the order in which they come."""

    def __iter__(self) -> Iterator[Weight]:
        """Yield each name with its array; an array may live only until the next is taken."""


class WeightTarget(Protocol):
    """What takes weights: an engine, or what stands in front of one."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """See `turnwise.protocols.Engine`."""


@frozen(kw_only=True)
class Offer:
    """
    A published version, as replicas are told of it. It crosses process borders.

    Attributes:
        version: of the weights.
        specs: what they are, in order.
        place: where the transport's readers find them.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    place: Mapping[str, Any] = field(factory=dict)

    @property
    def num_bytes(self) -> int:
        """How much they take."""
        return sum(spec.num_bytes for spec in self.specs)


@runtime_checkable
class WeightTransport(Protocol):
    """Carries weights from the trainer to the replicas; the same part is built at both ends."""

    def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AbstractAsyncContextManager[Offer]:
        """Offer a version while the context is open; leaving it, also by an error, frees all that it took."""

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Load an offered version into a replica by `Engine.update_weights`; raises what that raises."""

    async def close(self) -> None:
        """Free what outlives single versions. Idempotent."""


@frozen(kw_only=True)
class ReplicaUpdate:
    """
    How one replica took an update.

    Attributes:
        replica: its number.
        seconds: from the offer to its answer.
        error: why it serves the old version on, or is out of rotation; empty when it took the new one.
        torn: it is out of rotation until a whole update succeeds.
    """

    replica: int
    seconds: float
    error: str = ""
    torn: bool = False


@frozen(kw_only=True)
class UpdateReport:
    """
    What a weight update did.

    Attributes:
        version: that was brought.
        seconds: all of it.
        num_tensors: weights in it.
        num_bytes: their size, once.
        transport: what carried them; `direct` inside one process.
        replicas: one entry for each that was asked.
    """

    version: int
    seconds: float
    num_tensors: int
    num_bytes: int
    transport: str
    replicas: tuple[ReplicaUpdate, ...]
