"""
TRL's tree attention without its GPU kernel.

AsyncGRPOTrainer uses FlashAttention 3 for its attention `tree_fa3`, which needs a GPU and a download. The
implementation here uses torch's attention: it is exact but slow, and meant for laptops and tests.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def use_sdpa_tree_attention() -> None:
    """Compute TRL's tree attention with torch; call it after building the trainer."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    AttentionInterface.register(TREE_ATTENTION, sdpa_tree_attention)


def allow_cpu() -> None:
    """Let AsyncGRPOTrainer be built on a machine without a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer

    # The trainer reads the GPU's name for its FLOPs metrics, which fails without a GPU.
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda *_arguments: None


def sdpa_tree_attention(
    module: object,
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
    **options: object,
) -> tuple[Tensor, None]:
    """
    Attend from each segment of the tree to the path from the root to it.

    Args:
        module: unused.
        query: (1, H, N, D).
        key: (1, G, N, D), where G divides H.
        value: (1, G, N, D).
        attention_mask: unused; the tree defines the visible keys.
        tree_kv_index: (K,) token positions of the segments' paths, concatenated.
        tree_cu_seqlens_q: (S + 1,) starts of the segments among the N tokens.
        tree_cu_seqlens_k: (S + 1,) starts of the segments' paths in `tree_kv_index`.
        scaling: factor of the scores.
        sliding_window: limit of keys per query; None: no limit.
        options: options of TRL's kernel; `softcap` is not supported.

    Returns:
        The (1, N, H, D) output and None instead of attention weights.
    """
    if options.get("softcap"):
        raise NotImplementedError("torch's attention does not support the model's soft cap: use TRL's GPU kernel")
    outputs = []
    starts_q, starts_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for index, first in enumerate(starts_q[:-1]):
        queries = query[:, :, first : starts_q[index + 1]]
        path = tree_kv_index[starts_k[index] : starts_k[index + 1]]
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
