"""
The gradient noise scale: how many groups a batch needs before its gradient is more signal than noise.

The simple noise scale of McCandlish et al. 2018 ("An empirical model of large-batch training", arXiv:1812.06162) is
tr(Sigma) / |G|^2: the variance of one group's gradient over the squared length of the true one. A batch of b groups has
a gradient of expected squared length |G|^2 + tr(Sigma) / b, so parts of a batch and the whole batch give both (their
appendix A.1). Here b need not be the same for all parts.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor


@frozen
class NoiseEstimate:
    """
    Unbiased estimates from one batch; each can be negative.

    Attributes:
        signal: |G|^2, the squared length of the true gradient.
        trace: tr(Sigma), the summed variance of the gradient of one group.
    """

    signal: float
    trace: float


def estimate_noise(squares: Sequence[float], sizes: Sequence[float], whole: float) -> NoiseEstimate:
    """
    Return the estimates from the squared lengths of gradients.

    Args:
        squares: of the mean gradient of each part.
        sizes: groups of each part, at least two parts.
        whole: of the mean gradient of all groups.
    """
    num_groups = sum(sizes)
    excess = sum(squares) / len(squares) - whole
    trace = excess / (sum(1 / size for size in sizes) / len(sizes) - 1 / num_groups)
    return NoiseEstimate(signal=whole - trace / num_groups, trace=trace)


@define(eq=False)
class NoiseMeter:
    """
    Measures the gradients of an update, and changes none.

    It keeps a copy of the gradients while a further share accumulates, rounded to bfloat16: half a copy. A length is
    the root of a sum over all weights, so that their roundings, each of at most 1/256 and as often up as down, cancel.

    Each mini-batch is computed in shares, and their gradients are compared with the whole one. Mini-batches are not
    compared with each other, because the policy moves between them: after a long step the next gradient points back,
    which would look like noise.

    Attributes:
        model: has the gradients, possibly sharded; those of the shares of a mini-batch accumulate.
        reduce: returns the sum of a tensor over all processes that shard the model.
    """

    model: Any
    reduce: Callable[[Tensor], Tensor]
    _copies: dict[int, Tensor] = field(factory=dict, init=False)
    _squares: list[Tensor] = field(factory=list, init=False)
    _sizes: list[float] = field(factory=list, init=False)
    _measured: list[tuple[list[float], Tensor]] = field(factory=list, init=False)

    @torch.no_grad()
    def add_share(self, size: float, *, is_last: bool) -> None:
        """Measure how much a share of `size` groups added to the gradient of its mini-batch."""
        squares = []
        for number, parameter in enumerate(self.model.parameters()):
            if parameter.grad is None:
                continue
            gradient = local_part(parameter.grad)
            before = self._copies.pop(number, None)
            squares.append(_squared_length(gradient if before is None else gradient - before))
            if not is_last:
                self._copies[number] = gradient.to(torch.bfloat16)
        self._squares.append(_total(squares))
        self._sizes.append(size)

    @torch.no_grad()
    def end_mini_batch(self) -> None:
        """Call it after the last share of a mini-batch, while the model has the gradient."""
        if len(self._sizes) > 1:
            gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
            whole = _total([_squared_length(local_part(each)) for each in gradients])
            self._measured.append((self._sizes, torch.stack([*self._squares, whole])))
        self._copies, self._squares, self._sizes = {}, [], []

    def estimate(self) -> NoiseEstimate | None:
        """Return the mean over the mini-batches; None if none had two shares. Collective if the model is sharded."""
        if not self._measured:
            return None
        found = []
        for sizes, local in self._measured:
            *squares, whole = self.reduce(local).tolist()
            # A share added size / total of its mean gradient.
            parts = [square * (sum(sizes) / size) ** 2 for square, size in zip(squares, sizes, strict=True)]
            found.append(estimate_noise(parts, sizes, whole))
        return NoiseEstimate(
            signal=sum(each.signal for each in found) / len(found), trace=sum(each.trace for each in found) / len(found)
        )


def local_part(tensor: Any) -> Tensor:
    """Return this process's part of a sharded tensor, and any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _squared_length(tensor: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return length.square()


def _total(squares: Sequence[Tensor]) -> Tensor:
    """Return the sum in float64 on the host; 0 for a model without gradients."""
    return torch.stack(list(squares)).double().sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
