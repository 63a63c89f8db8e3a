"""
Segment attention: each run of tokens attends to its prefix and to itself, and the two results merge by log-sum-exp.

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
        plan: plan of a batch with B rows and T columns.
        scale: factor of the products; None is 1 / sqrt(D).

    Returns:
        (B, H, T, D); 0 in columns of padding.

    Raises:
        ValueError: the shapes do not match the plan, or G does not divide H.
    """
    num_rows, num_heads, num_columns, size = query.shape
    if (plan.num_rows, plan.num_columns) != (num_rows, num_columns) or key.shape[2] != num_columns:
        raise ValueError(
            f"the plan has {plan.num_rows} rows and {plan.num_columns} columns, but the queries have {num_rows} rows"
            f" and {num_columns} columns, and the keys {key.shape[2]} columns: make the plan from the same batch"
        )
    if num_heads % key.shape[1]:
        raise ValueError(f"the number of key heads, {key.shape[1]}, does not divide that of query heads, {num_heads}")
    if (repeats := num_heads // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    # torch leaves `Function.apply` without annotations.
    result: Tensor = _SegmentAttention.apply(query, key, value, plan, size**-0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return result


class _SegmentAttention(torch.autograd.Function):
    """Forward and backward pass over the parts of a plan."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, scale: float) -> Tensor:
        output = torch.zeros_like(query)
        accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full(query.shape[:3], -torch.inf, dtype=accumulator, device=query.device)
        for part in plan.runs:
            (q, k, v), (at, _) = _slice_part(part, query, key, value), _part_indices(part)
            part_output, part_lse = kernels.forward(q, k, v, causal=True, scale=scale)
            output[at], lse[at] = part_output, part_lse.to(accumulator)
        for part in plan.prefixes:
            (q, k, v), (at, _) = _slice_part(part, query, key, value), _part_indices(part)
            part_output, part_lse = kernels.forward(q, k, v, causal=False, scale=scale)
            output[at], lse[at] = kernels.merge(output[at], lse[at], part_output, part_lse.to(accumulator))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        parts: Iterable[Part] = (*ctx.plan.runs, *ctx.plan.prefixes)
        for part in parts:
            at, keys = _part_indices(part)
            # The kernels expect the gradient in the memory layout of the output.
            part_grad = grad[at].contiguous()
            shares = kernels.backward(
                part_grad,
                _slice_part(part, query, key, value),
                output[at],
                lse[at].contiguous(),
                causal=part.causal,
                scale=ctx.scale,
            )
            for total, indices, share in zip(grads, (at, keys, keys), shares, strict=True):
                total[indices] += share
        return (*grads, None, None)


def _part_indices(part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the indices of a part's queries and of its keys."""
    row = slice(part.row, part.row + 1)
    return (row, slice(None), part.queries), (row, slice(None), part.keys)


def _slice_part(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at, keys = _part_indices(part)
    return query[at], key[keys], value[keys]
