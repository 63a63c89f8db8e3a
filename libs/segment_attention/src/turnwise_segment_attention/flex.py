"""The visibility of segment attention for FlexAttention, which is fast on CUDA and has no backward pass on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_BLOCK = 128
_BAND = 8 * _BLOCK
"""Queries whose part of the mask exists at a time."""


def mask_mod(
    block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None, subtree_end: Tensor | None = None
) -> MaskMod:
    """
    Return the `mask_mod` of a batch.

    Args:
        block_start: (B, T), on the device of the attention.
        path_start: (B, T), on the same device.
        attention_mask: (B, T), 1 on real tokens; None if all are real. Padding sees only itself.
        subtree_end: (B, T), as in `turnwise_segment_attention.plan`; None if each row is one row.
    """
    if attention_mask is not None:
        real = attention_mask.bool()

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & ((key < block_start[row, query]) | (key >= path_start[row, query]))
        if subtree_end is not None:
            seen = seen & (query < subtree_end[row, key])
        if attention_mask is not None:
            seen = (seen & real[row, key] & real[row, query]) | (key == query)
        return seen

    return visible


def block_mask(
    block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None, subtree_end: Tensor | None = None
) -> Any:
    """
    Return the `BlockMask` of a batch, the `attention_mask` of `flex_attention`. It has (T / 128)^2 entries per row.

    Torch's `create_block_mask` builds the same, but from a whole (B, T, T) mask: 1 GiB per row at 32,768 columns, and
    several times as much while it is counted. Here at most (B, 1024, T) of the mask exist at a time.

    Args:
        block_start: (B, T).
        path_start: (B, T).
        attention_mask: (B, T), 1 on real tokens; None if all are real.
        subtree_end: (B, T), as in `turnwise_segment_attention.plan`; None if each row is one row.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_columns, visible = block_start.shape[1], mask_mod(block_start, path_start, attention_mask, subtree_end)
    counts = _count_visible(visible, block_start)
    full = counts == _BLOCK**2
    some = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(some), *_ordered(full), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(num_columns, num_columns)
    )


def _count_visible(visible: MaskMod, like: Tensor) -> Tensor:
    """Return (B, 1, N, N) the visible pairs in each of N x N blocks, for a batch shaped and placed as `like`."""
    num_rows, num_columns = like.shape
    row = torch.arange(num_rows, device=like.device)[:, None, None]
    columns = torch.arange(num_columns, device=like.device)
    padding = -num_columns % _BLOCK
    bands = []
    for queries in torch.split(columns, _BAND):
        seen = visible(row, row, queries[None, :, None], columns[None, None])
        seen = torch.nn.functional.pad(seen, (0, padding, 0, -len(queries) % _BLOCK))
        bands.append(seen.view(num_rows, seen.shape[1] // _BLOCK, _BLOCK, -1, _BLOCK).sum((2, 4)))
    return torch.cat(bands, 1)[:, None]


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks for each block of queries, and the indices of all, chosen ones first."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()
