"""
Attention of one part with its log-sum-exp, and the part's share of the gradient.

On a CPU torch's fused kernels compute them. `chunked_forward` and `chunked_backward` compute the same in plain torch on
any device, in chunks, so at most `_CHUNK` x `_CHUNK` scores exist at a time.

Shapes: query (B, H, Q, D), key and value (B, H, K, D), output (B, H, Q, D), lse (B, H, Q).
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1024
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
        grad: gradient of the merged output.
        qkv: query, key and value of the part.
        output: output merged over all parts of the queries.
        lse: log-sum-exp merged over the same parts; the merged values make the part's share of the gradient exact.
        causal: as in `forward`.
        scale: as in `forward`.
    """
    if grad.device.type != "cpu":
        return chunked_backward(grad, qkv, output, lse, causal=causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - no public name
    gradients: Gradients = kernel(grad, *qkv, output, lse, 0.0, causal, attn_mask=None, scale=scale)
    return gradients


def chunked_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `forward` in plain torch, with an online softmax (arXiv:1805.02867)."""
    outputs, sums = [], []
    for start in range(0, query.shape[2], _CHUNK):
        own = query[:, :, start : start + _CHUNK]
        output = torch.zeros_like(own, dtype=_accumulator(own))
        lse = torch.full(own.shape[:3], -torch.inf, dtype=output.dtype, device=own.device)
        for first, keys in _key_chunks(key, start, causal=causal):
            scores = _scores(own, keys, start, first, causal=causal, scale=scale)
            part = scores.logsumexp(-1)
            weights = (scores - part[..., None]).exp()
            own_value = value[:, :, first : first + _CHUNK].to(output.dtype)
            output, lse = merge(output, lse, weights @ own_value, part)
        outputs.append(output.to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def chunked_backward(
    grad: Tensor, qkv: Gradients, output: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Compute `backward` in plain torch."""
    query, key, value = qkv
    dtype = _accumulator(query)
    grads = tuple(torch.zeros_like(each, dtype=dtype) for each in qkv)
    for start in range(0, query.shape[2], _CHUNK):
        chunk = slice(start, start + _CHUNK)
        own, own_grad = query[:, :, chunk], grad[:, :, chunk].to(dtype)
        delta = (own_grad * output[:, :, chunk].to(dtype)).sum(-1, keepdim=True)
        for first, keys in _key_chunks(key, start, causal=causal):
            columns = slice(first, first + _CHUNK)
            scores = _scores(own, keys, start, first, causal=causal, scale=scale)
            weights = (scores - lse[:, :, chunk, None].to(dtype)).exp()
            inner = weights * (own_grad @ value[:, :, columns].to(dtype).mT - delta) * scale
            grads[0][:, :, chunk] += inner @ keys.to(dtype)
            grads[1][:, :, columns] += inner.mT @ own.to(dtype)
            grads[2][:, :, columns] += weights.mT @ own_grad
    return tuple(each.to(query.dtype) for each in grads)  # type: ignore[return-value]  # it has three


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs and log-sum-exps of attention over two sets of keys."""
    both = torch.logaddexp(lse, other_lse)
    share = (lse - both).exp()[..., None].to(output.dtype)
    other_share = (other_lse - both).exp()[..., None].to(output.dtype)
    return output * share + other * other_share, both


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _key_chunks(key: Tensor, start: int, *, causal: bool) -> list[tuple[int, Tensor]]:
    stop = min(key.shape[2], start + _CHUNK) if causal else key.shape[2]
    return [(first, key[:, :, first : first + _CHUNK]) for first in range(0, stop, _CHUNK)]


def _scores(query: Tensor, key: Tensor, start: int, first: int, *, causal: bool, scale: float) -> Tensor:
    dtype = _accumulator(query)
    scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    if causal and start == first:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores
