"""
The losses of policy and critic, token by token.

Pure functions of (M,) tensors, one entry for each token in the loss. The total loss is a weighted sum of the tokens'
losses. The weights (`token_weights`) contain every mean, so losses can be summed over micro-batches and processes.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from turnwise_grpo_trainer.config import KlType, LossAggMode

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped before `exp`, as in verl: a larger ratio would swallow a float32 sum."""


def token_weights(sequences: Tensor, mode: LossAggMode, *, response_length: int) -> Tensor:
    """
    Return (M,) the weight of each token in the loss of a mini-batch.

    Args:
        sequences: (M,) int64, the sequence of each token in the mini-batch's loss, over all processes: its episode, or
            its row.
        mode: `token-mean`: all tokens weigh the same (DAPO, arXiv:2503.14476). `seq-mean-token-mean`: all sequences
            weigh the same (GRPO). `seq-mean-token-sum`: the tokens of a sequence are summed. `seq-mean-token-sum-norm`:
            the same, divided by the constant `response_length`, so a sequence's length does not change its tokens'
            weights (Dr. GRPO, arXiv:2503.20783).
        response_length: the longest possible response.
    """
    ones = torch.ones_like(sequences, dtype=torch.float32)
    if mode == "token-mean":
        return ones / max(len(sequences), 1)
    sizes = torch.bincount(sequences)
    ones = ones / max(int(sizes.count_nonzero()), 1)
    if mode == "seq-mean-token-mean":
        return ones / sizes[sequences]
    return ones / response_length if mode == "seq-mean-token-sum-norm" else ones


def limit_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return log-ratios that `exp` takes without an overflow."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, Tensor]:
    """
    PPO's clipped loss (arXiv:1707.06347) with separate lower and upper bounds (DAPO, arXiv:2503.14476).

    Returns:
        (M,) losses, and (M,) bool: whether the bound stopped the gradient.
    """
    ratio = limit_log_ratio(log_probs - old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """
    Return (M,) truncated importance weights, at most `cap`, without gradient.

    They correct for an engine whose probabilities differ from the trainer's (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"; truncation by Ionides 2008).
    """
    log_ratio = limit_log_ratio((old_log_probs - rollout_log_probs).detach())
    return log_ratio.exp().clamp(max=cap)


def row_sums(values: Tensor, rows: Tensor) -> Tensor:
    """Return (M,) the sum of (M,) values over each entry's row; `rows` is (M,) int64."""
    _, index = torch.unique(rows, return_inverse=True)
    return values.new_zeros(len(rows)).index_add(0, index, values)[index]


def row_means(values: Tensor, rows: Tensor) -> Tensor:
    """Return (M,) the mean of (M,) values over each entry's row; `rows` is (M,) int64."""
    return row_sums(values, rows) / row_sums(torch.ones_like(values), rows)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KlType) -> Tensor:
    """
    Return (M,) estimates of KL(policy, reference) from single samples (Schulman 2020, "Approximating KL divergence").

    k1 is unbiased and may be negative; k2 is half its square; k3 is never negative and has low variance (used by GRPO).
    """
    log_ratio = _differ(log_probs, ref_log_probs)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    inverse = limit_log_ratio(-log_ratio)
    return inverse.exp() - inverse - 1


def _differ(log_probs: Tensor, others: Tensor) -> Tensor:
    """Return (M,) differences; 0 between two tokens that are both impossible, where -inf minus -inf is no number."""
    both = torch.isinf(log_probs) & torch.isinf(others)
    return torch.where(both, 0.0, log_probs - others)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> Tensor:
    """Return (M,) half the squared error, the larger one of the unclipped and the clipped value, as in PPO."""
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2


@frozen(kw_only=True)
class LogProbGap:
    """
    Difference between the log-probabilities of the trainer and of the engine.

    Attributes:
        mean: mean absolute difference.
        max: largest absolute difference.
        max_relative: largest difference divided by 1 + |log-probability|, because rounding errors grow with that size.
        kl: k3 estimate of KL(engine, trainer), from the engine's samples.
        num_tokens: number of compared tokens.
    """

    mean: float = 0.0
    max: float = 0.0
    max_relative: float = 0.0
    kl: float = 0.0
    num_tokens: int = 0


def log_prob_gap(log_probs: Tensor, rollout_log_probs: Tensor) -> LogProbGap:
    """Compare (M,) log-probabilities of trainer and rollout; zeros if there are no tokens."""
    if log_probs.numel() == 0:
        return LogProbGap()
    difference = _differ(log_probs, rollout_log_probs).detach().double()
    limited = limit_log_ratio(difference)
    kl = limited.exp() - limited - 1
    distance = difference.abs()
    size = torch.where(torch.isinf(rollout_log_probs), 0.0, rollout_log_probs.double().abs())
    return LogProbGap(
        mean=distance.mean().item(),
        max=distance.max().item(),
        max_relative=(distance / (1 + size)).max().item(),
        kl=kl.mean().item(),
        num_tokens=log_probs.numel(),
    )
