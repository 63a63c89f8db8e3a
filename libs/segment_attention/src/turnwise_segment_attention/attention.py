"""
Segment attention: each run of tokens attends to its prefix and to itself, merged by log-sum-exp.

Shapes: query (B, H, T, D), key and value (B, G, T, D) where G divides H.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from turnwise_segment_attention import kernels
from turnwise_segment_attention.layout import LayoutPlan, Part


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, scale: float | None = None
) -> Tensor:
    """
    Attend under a layout, without a mask.

    Args:
        query: (B, H, T, D).
        key: (B, G, T, D).
        value: (B, G, T, D).
        plan: of the B rows and T columns.
        scale: of the products; None is one over the root of D.

    Returns:
        (B, H, T, D); 0 where a column is a pad.

    Raises:
        ValueError: the plan is of another batch, or G does not divide H.
    """
    num_rows, num_heads, num_columns, size = query.shape
    if (plan.num_rows, plan.num_columns) != (num_rows, num_columns) or key.shape[2] != num_columns:
        raise ValueError(
            f"the plan is of {plan.num_rows} rows and {plan.num_columns} columns, the queries of {num_rows} and"
            f" {num_columns}, the keys of {key.shape[2]}"
        )
    if num_heads % key.shape[1]:
        raise ValueError(f"{key.shape[1]} heads of keys for {num_heads} heads of queries")
    if (repeats := num_heads // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    result: Tensor = _SegmentAttention.apply(query, key, value, plan, size**-0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return result


class _SegmentAttention(torch.autograd.Function):
    """The pass over the parts, and back."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, scale: float) -> Tensor:
        output = torch.zeros_like(query)
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full(query.shape[:3], -torch.inf, dtype=sums, device=query.device)
        for part in plan.runs:
            q, k, v = _taken(part, query, key, value)
            out, own = kernels.forward(q, k, v, causal=True, scale=scale)
            at = slice(part.row, part.row + 1), slice(None), part.queries
            output[at], lse[at] = out, own.to(sums)
        for part in plan.prefixes:
            q, k, v = _taken(part, query, key, value)
            out, own = kernels.forward(q, k, v, causal=False, scale=scale)
            at = slice(part.row, part.row + 1), slice(None), part.queries
            output[at], lse[at] = kernels.merge(output[at], lse[at], out, own.to(sums))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        parts: Iterable[Part] = (*ctx.plan.runs, *ctx.plan.prefixes)
        for part in parts:
            at, keys = _places(part)
            # The kernels want the gradient laid out as the output.
            own_grad = grad[at].contiguous()
            shares = kernels.backward(
                own_grad,
                _taken(part, query, key, value),
                output[at],
                lse[at].contiguous(),
                causal=part.causal,
                scale=ctx.scale,
            )
            for total, place, share in zip(grads, (at, keys, keys), shares, strict=True):
                total[place] += share
        return (*grads, None, None)


def _places(part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    row = slice(part.row, part.row + 1)
    return (row, slice(None), part.queries), (row, slice(None), part.keys)


def _taken(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at, keys = _places(part)
    return query[at], key[keys], value[keys]
