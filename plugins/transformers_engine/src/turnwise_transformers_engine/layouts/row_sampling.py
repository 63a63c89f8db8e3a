"""Samples the next token of each row with the parameters of its request."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from turnwise.types import SamplingParams
from turnwise_engine_support.requests import is_greedy, sampled_temperature


@torch.inference_mode()
def sample(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[Generator]
) -> tuple[list[int], list[float]]:
    """
    Sample a token for each row.

    The filters run in the same order as the manager's: temperature, top-k, top-p.

    Args:
        logits: (B, V).
        params: of each row.
        generators: of each row, on the device of the logits.

    Returns:
        Ids, and the log-probability of each under its sampling distribution, which is 0 for greedy rows.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    greedy = [is_greedy(each) for each in params]
    scores = scores / scores.new_tensor([sampled_temperature(each) for each in params])[:, None]
    for row, each in enumerate(params):
        if not greedy[row] and (each.top_k != -1 or each.top_p < 1):
            scores[row] = _filtered(scores[row], each)
    logprobs = scores.log_softmax(-1)
    keys = logprobs.clone()
    for row, generator in enumerate(generators):
        if not greedy[row]:
            # The argmax of log p - log e, with e exponential, is a sample of p (the Gumbel trick).
            noise = torch.empty_like(keys[row]).exponential_(generator=generator)
            keys[row] -= noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()
    chosen = keys.argmax(-1)
    values = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    return chosen.tolist(), [0.0 if best else value for value, best in zip(values, greedy, strict=True)]


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return (V,) scores, with -inf for ids outside top-k and top-p."""
    if params.top_k != -1 and params.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= params.top_p
        outside[0] = False  # a nucleus below the least number of float32 is 0, and still has the best id
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), -torch.inf)
    return scores
