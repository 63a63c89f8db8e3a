"""
Attention of one part with its log-sum-exp, and its share of the gradient.

On a CPU these are torch's fused kernels. `chunked_forward` and `chunked_backward` do the same in plain torch on any
device, in pieces, so that no more than `_PIECE` x `_PIECE` scores exist at a time.

Shapes: query (B, H, Q, D), key and value (B, H, K, D), output (B, H, Q, D), lse (B, H, Q).
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1024
Gradients = tuple[Tensor, Tensor, Tensor]


def forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp."""
    if query.device.type != "cpu":
        return chunked_forward(query, key, value, causal=causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - no public name
    output, lse = kernel(query, key, value, 0.0, causal, attn_mask=None, scale=scale)
    return output, lse


def backward(grad: Tensor, qkv: Gradients, output: Tensor, lse: Tensor, *, causal: bool, scale: float) -> Gradients:
    """
    Return the gradients of query, key and value of one part.

    Args:
        grad: of the merged output.
        qkv: query, key and value of the part.
        output: merged over all parts of the queries.
        lse: merged likewise; with these two the part's share of the gradient is exact.
        causal: as in `forward`.
        scale: as in `forward`.
    """
    if grad.device.type != "cpu":
        return chunked_backward(grad, qkv, output, lse, causal=causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - no public name
    gradients: Gradients = kernel(grad, *qkv, output, lse, 0.0, causal, attn_mask=None, scale=scale)
    return gradients


def chunked_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Do `forward` in plain torch, with the softmax computed as the keys come (arXiv:1805.02867)."""
    outputs, sums = [], []
    for start in range(0, query.shape[2], _PIECE):
        own = query[:, :, start : start + _PIECE]
        output = torch.zeros_like(own, dtype=_accumulator(own))
        lse = torch.full(own.shape[:3], -torch.inf, dtype=output.dtype, device=own.device)
        for first, keys in _key_pieces(key, start, causal=causal):
            scores = _scores(own, keys, start, first, causal=causal, scale=scale)
            part = scores.logsumexp(-1)
            weights = (scores - part[..., None]).exp()
            own_value = value[:, :, first : first + _PIECE].to(output.dtype)
            output, lse = merge(output, lse, weights @ own_value, part)
        outputs.append(output.to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def chunked_backward(
    grad: Tensor, qkv: Gradients, output: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Do `backward` in plain torch."""
    query, key, value = qkv
    dtype = _accumulator(query)
    grads = tuple(torch.zeros_like(each, dtype=dtype) for each in qkv)
    for start in range(0, query.shape[2], _PIECE):
        piece = slice(start, start + _PIECE)
        own, own_grad = query[:, :, piece], grad[:, :, piece].to(dtype)
        delta = (own_grad * output[:, :, piece].to(dtype)).sum(-1, keepdim=True)
        for first, keys in _key_pieces(key, start, causal=causal):
            columns = slice(first, first + _PIECE)
            scores = _scores(own, keys, start, first, causal=causal, scale=scale)
            weights = (scores - lse[:, :, piece, None].to(dtype)).exp()
            inner = weights * (own_grad @ value[:, :, columns].to(dtype).mT - delta) * scale
            grads[0][:, :, piece] += inner @ keys.to(dtype)
            grads[1][:, :, columns] += inner.mT @ own.to(dtype)
            grads[2][:, :, columns] += weights.mT @ own_grad
    return tuple(each.to(query.dtype) for each in grads)  # type: ignore[return-value]  # three of them


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two sets of keys from that over each."""
    both = torch.logaddexp(lse, other_lse)
    share = (lse - both).exp()[..., None].to(output.dtype)
    other_share = (other_lse - both).exp()[..., None].to(output.dtype)
    return output * share + other * other_share, both


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _key_pieces(key: Tensor, start: int, *, causal: bool) -> list[tuple[int, Tensor]]:
    stop = min(key.shape[2], start + _PIECE) if causal else key.shape[2]
    return [(first, key[:, :, first : first + _PIECE]) for first in range(0, stop, _PIECE)]


def _scores(query: Tensor, key: Tensor, start: int, first: int, *, causal: bool, scale: float) -> Tensor:
    dtype = _accumulator(query)
    scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    if causal and start == first:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores
