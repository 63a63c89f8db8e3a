"""The operators of the fused forward pass besides matrix products, by torch. They run on any device."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from turnwise_transformers_engine.fused.slab import Slab

AttendRows = Callable[[int, Tensor], Tensor]
"""Attends in a layer: its number, (B, H + 2 G, D) rotated projections -> (B, H * D)."""


@frozen(eq=False)
class Rotary:
    """
    Tables of the rotary positions, (positions, D) each.

    Attributes:
        cosine: of each position.
        sine: of each position, negative in the first half, so that rotating halves is one `roll`.
    """

    cosine: Tensor
    sine: Tensor


class Operators(Protocol):
    """The operators, in float32. N tokens of D dimensions a head; H heads share the keys of G groups."""

    def norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return (N, width) states divided by their root mean square, times (width,) weights."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return (N, width), silu of the first half of (N, 2 * width) times the second half."""

    def make_rotate(self, rotary: Rotary, positions: Tensor) -> Callable[[Tensor, Tensor | None, float], None]:
        """
        Return a function that rotates queries and keys by (N,) positions, in place.

        Its arguments are (N, H + G, D) queries and keys, which may be a view of the projections, (H + G, D) weights of
        a norm before it or None, and epsilon.
        """

    def make_attend(self, slab: Slab, positions: Tensor, length: int, num_heads: int) -> AttendRows:
        """
        Return a function that writes keys and values of one new token of each of B rows, and attends to its row.

        Args:
            slab: with the rows.
            positions: (B,), tokens of each row before the new one.
            length: tokens of the longest row, the new one included.
            num_heads: H.
        """


class TorchOperators:
    """See `Operators`."""

    def norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(states, weight.shape, weight, epsilon)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    def make_rotate(self, rotary: Rotary, positions: Tensor) -> Callable[[Tensor, Tensor | None, float], None]:
        cosine, sine = rotary.cosine[positions][:, None], rotary.sine[positions][:, None]
        depth = cosine.shape[-1]

        def rotate(keyed: Tensor, weight: Tensor | None, epsilon: float) -> None:
            normed = keyed if weight is None else rms_norm(keyed, (depth,), None, epsilon).mul_(weight)
            torch.addcmul(normed * cosine, normed.roll(depth // 2, -1), sine, out=keyed)

        return rotate

    def make_attend(self, slab: Slab, positions: Tensor, length: int, num_heads: int) -> AttendRows:
        num_rows, (groups, depth) = len(positions), slab.data.shape[-2:]
        slots, mask = slab.slots(positions), slab.mask(positions, length)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            data = slab.data[layer]
            data.view(-1, groups * depth).index_copy_(0, slots, qkv[:, num_heads:].reshape(-1, groups * depth))
            keys, values = data[:num_rows, :, :length].transpose(2, 3).unbind(1)
            # The heads of a group share keys, so they become further queries of the row.
            query = qkv[:, :num_heads].view(num_rows, groups, num_heads // groups, depth)
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask).reshape(num_rows, -1)

        return attend
