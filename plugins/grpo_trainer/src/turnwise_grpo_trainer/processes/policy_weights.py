"""The weights of a policy as a `turnwise.protocols.weights.WeightSource`: gathered as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from turnwise.protocols.weights import TensorSpec, Weight


@frozen(eq=False)
class PolicyWeights:
    """
    Weights that a trainer gathers one after the other.

    Attributes:
        specs: of all weights, in order.
        read: starts an iteration. A tensor may be valid only until the next one is read.
    """

    specs: tuple[TensorSpec, ...]
    read: Callable[[], Iterator[Weight]]

    def __iter__(self) -> Iterator[Weight]:
        return self.read()


def take_bytes(weights: Iterator[Weight], max_bytes: int) -> Iterator[Weight]:
    """Yield weights until they have `max_bytes` together, so that a larger one comes alone or last."""
    taken = 0
    while taken < max_bytes and (weight := next(weights, None)) is not None:
        taken += weight[1].nbytes
        yield weight
