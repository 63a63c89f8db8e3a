"""The policy's loss and its metrics, for the tokens of one micro-batch."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective.hooks import PolicyLoss
from turnwise_grpo_trainer.objective.loss_columns import more_inputs
from turnwise_grpo_trainer.objective.losses import importance_weights, kl_estimate, limit_log_ratio, row_means, row_sums


def policy_loss(
    algorithm: AlgorithmConfig,
    loss: PolicyLoss,
    columns: Mapping[str, Tensor],
    log_probs: Tensor,
    entropy: Tensor | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """
    Return the loss of each token, the part without KL and entropy, and values of the tokens for metrics.

    Args:
        algorithm: from rewards to a loss.
        loss: turns advantages into losses.
        columns: (M,) inputs of the loss on the micro-batch's tokens, by name.
        log_probs: (M,) of the policy.
        entropy: (M,) of the policy; None if it was not computed.

    Returns:
        (M,) losses; (M,) losses without KL and entropy; and (M,) values by the name of the metric that is their mean.
    """
    rollout = columns["rollout_log_probs"]
    if algorithm.old_log_probs == "rollout":
        old = rollout
    else:
        old = columns.get("old_log_probs", log_probs.detach())
    before = old if algorithm.target_kl is None else columns.get("old_log_probs", old)
    surrogate, values = loss.compute(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=rollout,
        advantages=columns["advantages"],
        rows=columns["row"],
        **more_inputs(loss, columns),
    )
    all_weights = importance_weights(log_probs, rollout, math.inf)
    measured = {
        **{f"actor/{name}": value for name, value in values.items()},
        "actor/approx_kl": kl_estimate(before, log_probs.detach(), "k3"),
        "importance/mean": all_weights,
        "importance/square": all_weights**2,
    }
    if algorithm.old_log_probs == "recompute":
        weight, corrected = correct_for_engine(algorithm, old, rollout, columns["row"])
        surrogate = surrogate * weight
        measured |= corrected
    total = surrogate
    if "ref_log_probs" in columns:
        kl = kl_estimate(log_probs, columns["ref_log_probs"], algorithm.kl_loss_type)
        measured["actor/kl"] = kl
        if not algorithm.use_kl_in_reward:
            total = total + algorithm.kl_loss_coef * kl
    if entropy is not None:
        measured["actor/entropy"] = entropy
        if algorithm.entropy_coeff != 0:
            total = total - algorithm.entropy_coeff * entropy
    return total, surrogate, measured


def correct_for_engine(
    algorithm: AlgorithmConfig, old: Tensor, rollout: Tensor, rows: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Return (M,) weights of the losses for an engine with other probabilities than the trainer, and (M,) metrics.

    Truncated importance sampling (TIS) weighs tokens or rows, see `losses.importance_weights`. Masked importance
    sampling (MIS) leaves out what is too far off: tokens, as IcePop does (Ling Team 2025, arXiv:2510.18855), or rows by
    the geometric mean of their ratios (Liu et al. 2025, "When speed kills stability").

    Args:
        algorithm: caps, bounds and levels.
        old: (M,) log-probabilities of the trainer before the update.
        rollout: (M,) of the engine.
        rows: (M,) int64, the row of each token.
    """
    log_ratio = (old - rollout).detach()
    weight, metrics = torch.ones_like(log_ratio), {}
    if algorithm.tis_imp_ratio_cap is not None:
        total = log_ratio if algorithm.tis_level == "token" else row_sums(log_ratio, rows)
        weight = importance_weights(total, torch.zeros_like(total), algorithm.tis_imp_ratio_cap)
        metrics["actor/tis_mean"] = weight
        metrics["actor/tis_capped"] = (weight >= algorithm.tis_imp_ratio_cap).float()
    if algorithm.mis_bounds is not None:
        mean = log_ratio if algorithm.mis_level == "token" else row_means(log_ratio, rows)
        ratio, (low, high) = limit_log_ratio(mean).exp(), algorithm.mis_bounds
        kept = ((ratio >= low) & (ratio <= high)).float()
        weight = weight * kept
        metrics["actor/mis_masked"] = 1 - kept
    return weight, metrics
