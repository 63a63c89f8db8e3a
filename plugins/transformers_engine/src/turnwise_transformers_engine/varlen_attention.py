"""
Attention of many sequences at once without a flash kernel: for continuous batching on a CPU.

transformers' own `sdpa` path lays all sequences of a step end to end and lets every query look at every key through a
mask, so a step costs the square of the batch. Here each sequence meets its own keys: those with about as many new
tokens are padded into one batch, long prompts go one by one. Results agree to rounding.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from turnwise_transformers_engine.paged_step import padded, plan_of, written

NAME: Final = "turnwise_varlen"


def register() -> str:
    """Make the attention known to transformers, and return its name; harmless a second time."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(**_options: Any) -> None:
    """Build nothing: where sequences begin says who sees whom."""


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
    Attend from N new tokens of several sequences, laid end to end, to all of their own tokens.

    Args:
        module: the layer.
        query: (1, H, N, D).
        key: (1, G, N, D) of the new tokens, with G dividing H.
        value: of the key's shape.
        attention_mask: of calls without a paged cache, which go to transformers' own `sdpa`.
        scaling: of the scores.
        sliding_window: most tokens that one sees, itself counted; None for all.
        cache: paged, with the keys and values of what was read before.
        options: `cu_seq_lens_q` and `cu_seq_lens_k`, (S + 1,) each: where sequences begin among the new tokens, and
            among all.

    Returns:
        (1, N, H, D), and no weights.
    """
    if cache is None or options.get("cu_seq_lens_q") is None:
        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, cache=cache, **options
        )
        return done
    pool = written(cache, cast(int, module.layer_idx), key, value, options)
    plan = plan_of(cache, pool, options["cu_seq_lens_q"], sliding_window)
    # Zeros: the step may be padded with tokens of no sequence, and what memory held could be NaN.
    out = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    for some in plan.together:
        keys, values = (
            padded(cache, name, tokens, some.pages, pool.page_size, len(some.rows))
            for name, tokens in (("keys", pool.keys), ("values", pool.values))
        )
        out[some.rows] = _together(query[0][:, some.rows], keys, values, some.seen, scaling)
    for each in plan.alone:
        own_keys, own_values = (tokens[each.slots].transpose(0, 1)[None] for tokens in (pool.keys, pool.values))
        out[each.new] = _alone(query[:, :, each.new], own_keys, own_values, scaling, sliding_window)
    return out[None], None


def _together(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float | None) -> Tensor:
    """Return (S, Q, H, D) for (H, S, Q, D) queries of S sequences, (S, L, G, D), and (S, 1, Q, L) who is seen."""
    groups, depth = keys.shape[2], query.shape[3]
    heads, num_rows, num_new = len(query) // groups, query.shape[1], query.shape[2]
    # The heads of a group share keys: they stand where further queries of the sequence would.
    queries = query.view(groups, heads, num_rows, num_new, depth).permute(2, 0, 1, 3, 4).flatten(2, 3)
    mask = seen if num_new == 1 else seen.repeat(1, 1, heads, 1)
    out = scaled_dot_product_attention(
        queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    return out.view(num_rows, groups, heads, num_new, depth).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _alone(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Return (N, H, D) for the last N tokens of one sequence of K: (1, H, N, D) and (1, G, K, D)."""
    num_new, num_all = query.shape[2], key.shape[2]
    seen: Tensor | None = None
    if num_new != num_all or window is not None:
        rows = torch.arange(num_all - num_new, num_all, device=query.device)[:, None]
        columns = torch.arange(num_all, device=query.device)[None]
        seen = columns <= rows
        if window is not None:
            seen = seen & (columns > rows - window)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)
