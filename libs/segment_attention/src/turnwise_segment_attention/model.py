"""Segment attention as an attention function of transformers, for any causal model that hands keyword arguments on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turnwise_segment_attention.attention import segment_attention
from turnwise_segment_attention.layout import LayoutPlan

NAME = "turnwise_segments"
"""What to give as `attn_implementation`."""


def register() -> None:
    """Make `NAME` known to transformers. Harmless a second time."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)


def attention_function(  # noqa: PLR0913 - the signature is that of transformers
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
    Attend as transformers asks for it.

    Args:
        module: the attention module.
        query: (B, H, T, D).
        key: (B, G, T, D).
        value: (B, G, T, D).
        attention_mask: must be None: transformers makes no mask for an attention function that it does not know.
        scaling: of the products.
        dropout: must be 0.
        layout: the plan, a keyword argument of the model's forward.

    Returns:
        (B, T, H, D), and no weights.

    Raises:
        ValueError: there is no plan, or something that this attention does not do was asked for.
    """
    if layout is None:
        raise ValueError(f"attention {NAME!r} needs the keyword argument 'layout', a plan, in the call of the model")
    if attention_mask is not None or dropout or getattr(module, "sliding_window", None):
        raise ValueError(f"attention {NAME!r} takes no mask, no dropout and no sliding window")
    return segment_attention(query, key, value, layout, scaling).transpose(1, 2), None
