"""
The policy's and the critic's losses, token by token.

Pure functions of (M,) tensors, one entry for each token that enters the loss. A loss is a sum over tokens of a weight
times the token's own loss; the weights (`token_weights`) hold every mean, so that a sum over micro-batches and
processes is the loss of the whole.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3"]
_LARGEST_LOG_RATIO = 20.0
"""Where `exp` of a log-ratio is cut, as verl does: beyond it a float32 sum is lost."""


def token_weights(rows: Tensor, mode: LossAggMode, *, num_rows: int, num_tokens: int, response_length: int) -> Tensor:
    """
    Return (M,) what each token counts for in the loss of a mini-batch.

    Args:
        rows: (M,) int64, the row of each token.
        mode: `token-mean`: every token the same (DAPO, arXiv:2503.14476). `seq-mean-token-mean`: every row the same
            (GRPO). `seq-mean-token-sum`: rows are summed over their tokens. `seq-mean-token-sum-norm`: the same over
            the constant `response_length`, so that length changes nothing (Dr. GRPO, arXiv:2503.20783).
        num_rows: rows of the mini-batch that have tokens in the loss, those of other processes included.
        num_tokens: its tokens in the loss, those of other processes included.
        response_length: the longest that a response may be.
    """
    ones = torch.ones_like(rows, dtype=torch.float32)
    if mode == "token-mean":
        return ones / max(num_tokens, 1)
    ones = ones / max(num_rows, 1)
    if mode == "seq-mean-token-mean":
        return ones / torch.bincount(rows).clamp(min=1)[rows]
    return ones / response_length if mode == "seq-mean-token-sum-norm" else ones


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, Tensor]:
    """
    PPO's clipped loss (arXiv:1707.06347), with a bound of its own on either side (DAPO, arXiv:2503.14476).

    Returns:
        (M,) losses, and (M,) bool: where the bound cut the gradient.
    """
    ratio = (log_probs - old_log_probs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(free, bound), bound > free


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """
    Return (M,) truncated importance weights, at most `cap`, without gradient.

    They correct for an engine whose probabilities differ from the trainer's (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"; truncation by Ionides 2008).
    """
    log_ratio = (old_log_probs - rollout_log_probs).detach().clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KlType) -> Tensor:
    """
    Return (M,) estimates of KL(policy, reference) from single samples (Schulman 2020, "Approximating KL divergence").

    k1 is unbiased and may be negative; k2 is half its square; k3 is never negative and of low variance (GRPO uses it).
    """
    log_ratio = log_probs - ref_log_probs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    inverse = (-log_ratio).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return inverse.exp() - inverse - 1


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> Tensor:
    """Return (M,) half the squared error, the worse of the free and the clipped one, as PPO's critics have it."""
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2


@frozen(kw_only=True)
class LogProbGap:
    """
    How far the trainer's log-probabilities are from those that the engine sampled with.

    Attributes:
        mean: of the absolute difference.
        max: largest absolute difference.
        max_relative: largest difference over 1 + the size of the log-probability, with which rounding grows.
        kl: k3 estimate of KL(engine, trainer), from the engine's samples.
        num_tokens: how many tokens were compared.
    """

    mean: float = 0.0
    max: float = 0.0
    max_relative: float = 0.0
    kl: float = 0.0
    num_tokens: int = 0


def log_prob_gap(log_probs: Tensor, rollout_log_probs: Tensor) -> LogProbGap:
    """Compare (M,) log-probabilities of the trainer with those of the rollout; no tokens give zeros."""
    if log_probs.numel() == 0:
        return LogProbGap()
    difference = (log_probs - rollout_log_probs).detach().double()
    kl = difference.exp() - difference - 1
    distance = difference.abs()
    return LogProbGap(
        mean=distance.mean().item(),
        max=distance.max().item(),
        max_relative=(distance / (1 + rollout_log_probs.double().abs())).max().item(),
        kl=kl.mean().item(),
        num_tokens=log_probs.numel(),
    )
