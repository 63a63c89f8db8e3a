"""
Weight updates: sources of weights, and the interface of transports that carry them from a trainer to engines.

An update is a stream of (name, array) pairs, with the names of the Hugging Face state dict. An array is a numpy array,
with bfloat16 as `ml_dtypes.bfloat16`, or a torch tensor if a transport delivers on the device. This module imports no
tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

WeightArray: TypeAlias = "np.ndarray | Tensor"
Weight = tuple[str, WeightArray]
"""A name of the state dict and its array."""

MemoryTag = Literal["weights", "kv_cache"]
TAGS: Final[tuple[MemoryTag, ...]] = ("weights", "kv_cache")
"""The parts of an engine's memory that sleep, in the order in which they wake up."""


def dtype_of(name: str) -> np.dtype:
    """Return numpy's dtype of a name such as `float32` or `bfloat16`; `ValueError` for an unknown name."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        name = getattr(ml_dtypes, name, name)
    try:
        return np.dtype(name)
    except TypeError:
        raise ValueError(f"unknown dtype {name!r} of a weight") from None


@frozen
class TensorSpec:
    """Name in the state dict, shape and dtype of one weight; the dtype by numpy's name, or `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@frozen
class StoredWeight:
    """A weight in a file that processes on this host can map: C-contiguous bytes from `offset`, a multiple of 64."""

    spec: TensorSpec
    path: str
    offset: int


@runtime_checkable
class WeightSource(Protocol):
    """
    Weights whose names, shapes and dtypes are known before they are read. It can be iterated more than once.

    A source whose weights are complete and verified in files may have an attribute `stored`, a sequence of
    `StoredWeight` in the order of iteration. The files exist until `Engine.update_weights` returns.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight, in the order of iteration."""

    def __iter__(self) -> Iterator[Weight]:
        """Yield each name with its array; an array may be valid only until the next one is read."""


class WeightTarget(Protocol):
    """A receiver of weights: an engine, or a wrapper of one."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """See `turnwise.protocols.Engine`."""


@frozen(kw_only=True)
class WeightManifest:
    """
    Description of a published version, which replicas receive. It crosses process borders.

    Attributes:
        version: of the weights.
        specs: every weight, in order.
        locator: the transport's own data, by which its readers find the weights.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    locator: Mapping[str, Any] = field(factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of all weights in bytes."""
        return sum(spec.num_bytes for spec in self.specs)


@runtime_checkable
class WeightTransport(Protocol):
    """
    Carries weights from the trainer to the replicas. Both sides build the same transport.

    A transport may have an attribute `lasting`. If it is true, more replicas than `num_readers` may apply a version for
    as long as its context is open. The run then keeps the context of the last version open for restarted replicas, and
    keeps no copy of the weights.
    """

    def publish(
        self, version: int, weights: Iterable[Weight], num_readers: int
    ) -> AbstractAsyncContextManager[WeightManifest]:
        """Make a version readable while the context is open; at its end, or after an error, free all of its memory."""

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Update an engine to a published version by `Engine.update_weights`; raises the same errors."""

    async def close(self) -> None:
        """Free resources that outlive single versions. Idempotent."""


@frozen(kw_only=True)
class ReplicaUpdate:
    """
    Result of an update on one replica.

    Attributes:
        replica: its index.
        seconds: from sending the manifest to the reply.
        error: why the replica kept the old version, or is out of rotation; empty if it has the new version.
        torn: the replica is out of rotation until a complete update succeeds.
    """

    replica: int
    seconds: float
    error: str = ""
    torn: bool = False


@frozen(kw_only=True)
class UpdateReport:
    """
    Result of a weight update on all replicas.

    Attributes:
        version: of the new weights.
        seconds: duration of the whole update.
        num_tensors: number of weights.
        num_bytes: their size, counted once.
        transport: name of the transport; `direct` inside one process.
        replicas: one entry for each replica.
    """

    version: int
    seconds: float
    num_tensors: int
    num_bytes: int
    transport: str
    replicas: tuple[ReplicaUpdate, ...]
