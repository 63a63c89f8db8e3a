"""Segment attention as an attention function of transformers, for causal models that forward keyword arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turnwise_segment_attention.attention import segment_attention
from turnwise_segment_attention.layout import LayoutPlan

NAME = "turnwise_segments"
"""The value for `attn_implementation`."""


def register() -> None:
    """Register `NAME` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)


def attention_function(  # noqa: PLR0913 - transformers defines the signature
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    dropout: float = 0.0,
    layout: LayoutPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """
    Attend with the signature of transformers.

    Args:
        module: the attention module.
        query: (B, H, T, D).
        key: (B, G, T, D).
        value: (B, G, T, D).
        attention_mask: must be None; transformers makes no mask for a registered attention function.
        scaling: factor of the products.
        dropout: must be 0.
        layout: the plan, a keyword argument of the model's forward.

    Returns:
        (B, T, H, D), and None for the attention weights.

    Raises:
        ValueError: `layout` is missing, or the model has a mask, dropout or a sliding window.
    """
    if layout is None:
        raise ValueError(f"attention {NAME!r} needs a plan: call the model with the keyword argument 'layout'")
    if attention_mask is not None or dropout or getattr(module, "sliding_window", None):
        raise ValueError(f"attention {NAME!r} supports no mask, no dropout and no sliding window")
    return segment_attention(query, key, value, layout, scaling).transpose(1, 2), None
