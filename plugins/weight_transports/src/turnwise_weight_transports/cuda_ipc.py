"""By handles on the memory of one GPU, for a trainer and replicas that share it: nothing is copied on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from attrs import define, field, frozen

from turnwise.errors import EngineError
from turnwise.weight_sources import source_of
from turnwise.weights import Offer, TensorSpec, Weight, WeightTarget
from turnwise_weight_transports.config import CudaIpcConfig

Handle = tuple[Callable[..., Any], tuple[Any, ...]]


@define(eq=False)
class CudaIpcTransport:
    """
    The transport `cuda_ipc`. Trainer and replica are processes that see the same GPU under the same number.

    Attributes:
        share: returns a tensor's handle, a function and its arguments; torch's own unless given.
    """

    config: CudaIpcConfig = field(factory=CudaIpcConfig)
    share: Callable[[Any], Handle] | None = None

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Lend the weights while the context is open; they must not change meanwhile."""
        source = source_of(weights)
        share = self.share or _share
        lent = [(name, tensor.detach().contiguous()) for name, tensor in source]
        handles = [(name, share(tensor)) for name, tensor in lent]
        yield Offer(version=version, specs=source.specs, place={"handles": handles})
        lent.clear()

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Let the engine copy from the lent memory."""
        await engine.update_weights(LentSource(offer), offer.version)

    async def close(self) -> None:
        """Do nothing: handles end with their version."""


@frozen(eq=False)
class LentSource:
    """The weights behind an offer's handles."""

    offer: Offer

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight."""
        return self.offer.specs

    def __iter__(self) -> Iterator[Weight]:
        """Open each handle, and let go of it before the next."""
        for name, (rebuild, arguments) in self.offer.place["handles"]:
            yield name, rebuild(*arguments)


def _share(tensor: Any) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    if not tensor.is_cuda:
        raise EngineError(f"the transport cuda_ipc carries tensors on a GPU, and one is on {tensor.device}")
    handle: Handle = reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch leaves it so
    return handle
