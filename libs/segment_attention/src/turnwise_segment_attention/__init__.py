"""
Attention over records with parallel paths, without an L x L mask.

`plan` turns two ints per token into ranges, `segment_attention` attends within them, `register` registers it with
transformers, and `block_mask` returns the same visibility for FlexAttention on CUDA.
"""

from __future__ import annotations

from turnwise_segment_attention.attention import segment_attention
from turnwise_segment_attention.flex import block_mask, mask_mod
from turnwise_segment_attention.layout import LayoutPlan, Part, plan, predecessors
from turnwise_segment_attention.model import NAME, OPTIONAL_NAME, register

__all__ = [
    "NAME",
    "OPTIONAL_NAME",
    "LayoutPlan",
    "Part",
    "block_mask",
    "mask_mod",
    "plan",
    "predecessors",
    "register",
    "segment_attention",
]
