"""The visibility of segment attention for FlexAttention, which is fast on CUDA and has no backward pass on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None) -> MaskMod:
    """
    Return the `mask_mod` of a batch.

    Args:
        block_start: (B, T), on the device of the attention.
        path_start: (B, T), on the same device.
        attention_mask: (B, T), 1 on real tokens; None if all are real. Padding sees only itself.
    """
    if attention_mask is not None:
        real = attention_mask.bool()

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & ((key < block_start[row, query]) | (key >= path_start[row, query]))
        if attention_mask is not None:
            seen = (seen & real[row, key] & real[row, query]) | (key == query)
        return seen

    return visible


def block_mask(block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None) -> Any:
    """
    Return the `BlockMask` of a batch, the `attention_mask` of `flex_attention`. It has (T / 128)^2 entries per row.

    Args:
        block_start: (B, T).
        path_start: (B, T).
        attention_mask: (B, T), 1 on real tokens; None if all are real.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, num_columns = block_start.shape
    return create_block_mask(
        mask_mod(block_start, path_start, attention_mask),
        num_rows,
        None,
        num_columns,
        num_columns,
        device=str(torch.device(block_start.device)),
    )
