"""Segment attention as an attention function of transformers, for causal models that forward keyword arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turnwise_segment_attention.attention import segment_attention
from turnwise_segment_attention.layout import LayoutPlan

NAME = "turnwise_segments"
"""The value for `attn_implementation`."""


OPTIONAL_NAME = "turnwise_segments_or_sdpa"
"""The value for `attn_implementation` of models that get a plan in some calls, and are as with `sdpa` in all others."""


def register() -> None:
    """Register `NAME` and `OPTIONAL_NAME` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_function)
    AttentionInterface.register(OPTIONAL_NAME, optional_attention_function)
    AttentionMaskInterface.register(OPTIONAL_NAME, sdpa_mask)


def attention_function(  # noqa: PLR0913 - transformers defines the signature
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    dropout: float = 0.0,
    layout: LayoutPlan | None = None,
    **_: object,
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


def optional_attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """
    Attend under a plan if there is one, and else as `sdpa` of transformers; arguments as in `attention_function`.

    With a plan, the mask is ignored, and so is a sliding window: the caller keeps rows within it. Give a mask of four
    dimensions, such as (1, 1, 1, 1), which transformers passes on, or it builds one of all pairs for nothing.

    Raises:
        ValueError: dropout is not 0 with a plan.
    """
    layout = more.pop("layout", None)
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return output, None
    if more.get("dropout"):
        raise ValueError(f"attention {OPTIONAL_NAME!r} supports no dropout with a plan")
    return segment_attention(query, key, value, layout, more.get("scaling")).transpose(1, 2), None
