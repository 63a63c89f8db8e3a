"""
Attention of many sequences at once without a flash kernel: for continuous batching on a CPU.

transformers' own `sdpa` path lays all sequences of a step end to end and lets every query look at every key through a
mask, so a step costs the square of the batch. Here each sequence meets its own keys: those that decode one token are
padded into one batch, those that read a prompt go one by one. Results agree to rounding.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

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
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    starts_q, starts_k = options["cu_seq_lens_q"].long(), options["cu_seq_lens_k"].long()
    num_new = starts_q.diff()
    # Zeros: the step may be padded with tokens of no sequence, and what memory held could be NaN.
    out = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    single = (num_new == 1).nonzero().squeeze(1)
    if len(single):
        rows = starts_q[single]
        lengths = starts_k.diff()[single]
        out[rows] = _one_each(query[0][:, rows], key[0], value[0], starts_k[single], lengths, scaling, sliding_window)
    several = (num_new > 1).nonzero().squeeze(1).tolist()
    ends_q, ends_k = starts_q.tolist(), starts_k.tolist()
    for sequence in several:
        new, own = slice(*ends_q[sequence : sequence + 2]), slice(*ends_k[sequence : sequence + 2])
        out[new] = _several(query[:, :, new], key[:, :, own], value[:, :, own], scaling, sliding_window)
    return out[None], None


def _one_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return (B, H, D) for (H, B, D) queries, one for each of B sequences, whose keys are padded into one batch."""
    heads, groups = query.shape[0], key.shape[0]
    offset = torch.arange(int(lengths.max()), device=query.device)[None]
    real = offset < lengths[:, None]
    if window is not None:
        real &= offset >= lengths[:, None] - window
    index = torch.where(offset < lengths[:, None], starts[:, None] + offset, starts[:, None]).flatten()
    # As the cache keeps them, the groups of a token stand together: one copy for each token.
    keys, values = (
        each.transpose(0, 1).index_select(0, index).view(*real.shape, groups, -1).transpose(1, 2)
        for each in (key, value)
    )
    # The heads of a group share keys: they stand where the queries of one sequence would.
    queries = query.view(groups, heads // groups, *query.shape[1:]).permute(2, 0, 1, 3)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=real[:, None, None], scale=scaling)
    return out.flatten(1, 2)


def _several(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
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
