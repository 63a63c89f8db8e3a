"""Lends the memory of one GPU by handles, for a trainer and replicas that share it: nothing is copied on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight, WeightArray, WeightManifest, WeightTarget
from turnwise.weights.sources import as_tensor, source_of
from turnwise_weight_transports.buckets import ReceivedSource
from turnwise_weight_transports.config import CudaIpcConfig

if TYPE_CHECKING:
    from torch import Tensor

Handle = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, which return the tensor in another process."""

_LENT: Final[dict[str, list[tuple[str, Any]]]] = {}
"""The weights that this process lends, by the key of their manifest."""


def make_handle(tensor: Any) -> Handle:
    """Return torch's handle on the memory of a tensor; `EngineError` when the tensor is not on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    if not tensor.is_cuda:
        raise EngineError(
            f"the transport cuda_ipc expects tensors on a GPU, but one is on {tensor.device}: set weight_transport to"
            " another transport, such as shm"
        )
    handle: Handle = reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return handle


@define(eq=False)
class CudaIpcTransport:
    """
    The transport `cuda_ipc`, for processes that see the same GPU under the same number.

    Attributes:
        config: without options.
        make_handle: returns the handle of a tensor; tests replace it.
        device: numpy arrays, such as the copies for restarted replicas, are copied to it if there is a GPU.
    """

    config: CudaIpcConfig = field(factory=CudaIpcConfig)
    make_handle: Callable[[Any], Handle] = make_handle
    device: str = "cuda"

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        """Lend the weights while the context is open; their values must not change meanwhile."""
        import torch

        source = source_of(weights)
        # A contiguous copy must outlive its handle, so this variable holds the tensors until the context is left.
        lent = [(name, self._on_device(weight, torch).detach().contiguous()) for name, weight in source]
        handles = [(name, self.make_handle(tensor)) for name, tensor in lent]
        key = uuid4().hex
        _LENT[key] = lent
        locator = {"handles": handles, "key": key, "checksums": _read_checksums([_checksum(t, torch) for _, t in lent])}
        try:
            yield WeightManifest(version=version, specs=source.specs, locator=locator)
        finally:
            del _LENT[key]

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Let the engine copy from the lent memory."""
        await engine.update_weights(ReceivedSource(manifest, partial(_receive, manifest)), manifest.version)

    async def close(self) -> None:
        """Do nothing: handles end with their version."""

    def _on_device(self, weight: WeightArray, torch: ModuleType) -> Tensor:
        tensor = as_tensor(weight, torch)
        is_copied = isinstance(weight, np.ndarray) and torch.cuda.is_available()
        return tensor.to(self.device) if is_copied else tensor


def _receive(manifest: WeightManifest) -> Iterator[Weight]:
    """
    Yield the lent weights; `EngineError` at the end if their owner changed one before the reader had copied it.

    A reader copies a weight before it asks for the next one, so a checksum that is computed then covers the copy: on a
    GPU it runs after the copy, on the same stream. All checksums are read at the end: each read waits for the GPU.
    """
    import torch

    sums = []
    for name, tensor in _open_handles(manifest):
        yield name, tensor
        sums.append(_checksum(tensor, torch))
    for spec, found, lent in zip(manifest.specs, _read_checksums(sums), manifest.locator["checksums"], strict=True):
        if found != lent:
            raise EngineError(f"received weights are damaged: {spec.name!r} was changed while it was copied")


def _checksum(tensor: Tensor, torch: ModuleType) -> Tensor:
    """Return the sum of a contiguous tensor's bits, as a tensor on its device."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.reshape(-1).view(bits).sum(dtype=torch.int64)


def _read_checksums(sums: Sequence[Tensor]) -> list[int]:
    """Return checksums as numbers, with one read for each device."""
    import torch

    on_host: dict[Any, list[int]] = {
        device: torch.stack([each for each in sums if each.device == device]).tolist()
        for device in {each.device for each in sums}
    }
    left = {device: iter(values) for device, values in on_host.items()}
    return [next(left[each.device]) for each in sums]


def _open_handles(manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
    # CUDA refuses to open a handle in the process that made it.
    if (own := _LENT.get(manifest.locator["key"])) is not None:
        yield from own
        return
    for name, (rebuild, arguments) in manifest.locator["handles"]:
        # Each tensor is released before the next handle is opened.
        yield name, rebuild(*arguments)
