"""
TRL's tree attention without its GPU kernel.

AsyncGRPOTrainer names its attention `tree_fa3` and takes FlashAttention 3 for it, which needs a GPU and a download.
The same tree over torch's own attention is exact and slow: for a laptop, and for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def use_sdpa_tree_attention() -> None:
    """Let models whose attention is TRL's tree attention compute it with torch; call it after making the trainer."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    AttentionInterface.register(TREE_ATTENTION, sdpa_tree_attention)


def allow_cpu() -> None:
    """Let AsyncGRPOTrainer be made on a machine without a GPU: it asks for the GPU's name to know its speed."""
    from trl.experimental.async_grpo import async_grpo_trainer

    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda *_arguments: None


def sdpa_tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """
    Attend from each segment of the tree to the path from the root to it.

    Args:
        module: asked for nothing.
        query: (1, H, N, D).
        key: (1, G, N, D) with G dividing H.
        value: of the key's shape.
        attention_mask: not looked at; the tree says who sees whom.
        tree_kv_index: (K,) packed positions of the paths of all segments, end to end.
        tree_cu_seqlens_q: (S + 1,) where segments begin among the N tokens.
        tree_cu_seqlens_k: (S + 1,) where their paths begin in `tree_kv_index`.
        scaling: of the scores.
        sliding_window: most keys that a query sees; None for all.
        options: of the kernel that this stands for.

    Returns:
        (1, N, H, D), and no weights.
    """
    if options.get("softcap"):
        raise NotImplementedError("torch's attention has no soft cap: such a model needs TRL's own kernel")
    outputs = []
    begins_q, begins_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for index, first in enumerate(begins_q[:-1]):
        queries = query[:, :, first : begins_q[index + 1]]
        path = tree_kv_index[begins_k[index] : begins_k[index + 1]]
        num_queries, num_keys = queries.shape[2], len(path)
        rows = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        columns = torch.arange(num_keys, device=query.device)[None, :]
        mask = columns <= rows
        if sliding_window:
            mask &= columns > rows - sliding_window
        outputs.append(
            scaled_dot_product_attention(
                queries, key[:, :, path], value[:, :, path], attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None
