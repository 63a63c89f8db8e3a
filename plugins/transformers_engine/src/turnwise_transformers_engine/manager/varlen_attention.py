"""
Attention over many sequences without a flash kernel, for continuous batching on a CPU.

transformers' own `sdpa` path concatenates all sequences of a step and lets every query attend to every key behind a
mask, so a step costs the square of the batch. Here each sequence attends only to its own keys. Sequences with about as
many new tokens are padded into one batch, and long prompts run one by one. Results agree to rounding.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from turnwise_transformers_engine.manager.paged_step import gather_pages, get_plan, write_keys_values

NAME: Final = "turnwise_varlen"


def register() -> str:
    """Register the attention with transformers, and return its name. Idempotent."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(**_options: object) -> None:
    """Make no mask: the sequence bounds determine visibility."""


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """
    Attend from N new tokens of several concatenated sequences to all tokens of the same sequence.

    Args:
        module: the layer.
        query: (1, H, N, D).
        key: (1, G, N, D) of the new tokens, with G dividing H.
        value: of the key's shape.
        attention_mask: for calls without a paged cache, which use transformers' own `sdpa`.
        scaling: of the scores.
        sliding_window: most tokens that a token attends to, itself included; None for all.
        cache: the paged cache, with the keys and values of earlier tokens.
        options: `cu_seq_lens_q` and `cu_seq_lens_k`, (S + 1,) each: start of each sequence among the new tokens, and
            among all.

    Returns:
        (1, N, H, D), and None for the attention weights.
    """
    if cache is None or options.get("cu_seq_lens_q") is None:
        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, cache=cache, **options
        )
        return done
    pool = write_keys_values(cache, cast(int, module.layer_idx), key, value, options)
    plan = get_plan(cache, pool, options["cu_seq_lens_q"], sliding_window)
    # Zeros, because padding tokens belong to no sequence, and uninitialised memory could be NaN.
    out = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    for batch in plan.batches:
        keys, values = (
            gather_pages(cache, name, tokens, batch.pages, pool.page_size, len(batch.rows))
            for name, tokens in (("keys", pool.keys), ("values", pool.values))
        )
        out[batch.rows] = _attend_batch(query[0][:, batch.rows], keys, values, batch.visible, scaling)
    for single in plan.singles:
        own_keys, own_values = (tokens[single.slots].transpose(0, 1)[None] for tokens in (pool.keys, pool.values))
        out[single.new] = _attend_single(query[:, :, single.new], own_keys, own_values, scaling, sliding_window)
    return out[None], None


def _attend_batch(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float | None) -> Tensor:
    """Return (S, Q, H, D) for (H, S, Q, D) queries, (S, L, G, D) keys and values, and (S, 1, Q, L) visibility."""
    groups, depth = keys.shape[2], query.shape[3]
    heads, num_rows, num_new = len(query) // groups, query.shape[1], query.shape[2]
    # The heads of a group share keys, so they become further queries of the sequence.
    queries = query.view(groups, heads, num_rows, num_new, depth).permute(2, 0, 1, 3, 4).flatten(2, 3)
    mask = visible if num_new == 1 else visible.repeat(1, 1, heads, 1)
    out = scaled_dot_product_attention(
        queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    return out.view(num_rows, groups, heads, num_new, depth).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_single(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Return (N, H, D) for the last N of K tokens of one sequence: (1, H, N, D) queries, (1, G, K, D) keys."""
    num_new, num_all = query.shape[2], key.shape[2]
    visible: Tensor | None = None
    if num_new != num_all or window is not None:
        rows = torch.arange(num_all - num_new, num_all, device=query.device)[:, None]
        columns = torch.arange(num_all, device=query.device)[None]
        visible = columns <= rows
        if window is not None:
            visible = visible & (columns > rows - window)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)
