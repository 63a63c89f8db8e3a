"""The policy's loss and its metrics, for the tokens of one micro-batch."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.losses import clipped_surrogate, importance_weights, kl_estimate


def policy_loss(
    algorithm: AlgorithmConfig, columns: Mapping[str, Tensor], log_probs: Tensor, entropy: Tensor | None, share: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Return the loss of each token, and the micro-batch's part of the metrics.

    Args:
        algorithm: from rewards to a loss.
        columns: (M,) inputs of the loss on the micro-batch's tokens, by name.
        log_probs: (M,) of the policy.
        entropy: (M,) of the policy; None if it was not computed.
        share: of one token in the metrics: 1 over the tokens of the mini-batch.
    """
    rollout = columns["rollout_log_probs"]
    old = columns.get("old_log_probs", log_probs.detach())
    if algorithm.old_log_probs == "rollout":
        old = rollout
    surrogate, clipped = clipped_surrogate(
        log_probs, old, columns["advantages"], algorithm.clip_ratio_low, algorithm.clip_ratio_high
    )
    all_weights = importance_weights(log_probs, rollout, math.inf)
    parts = {
        "actor/clip_frac": clipped.float().sum() * share,
        "actor/approx_kl": kl_estimate(old, log_probs.detach(), "k3").sum() * share,
        "importance/mean": all_weights.sum() * share,
        "importance/square": (all_weights**2).sum() * share,
    }
    if algorithm.tis_imp_ratio_cap is not None and algorithm.old_log_probs == "recompute":
        weight = importance_weights(old, rollout, algorithm.tis_imp_ratio_cap)
        surrogate = surrogate * weight
        parts["actor/tis_mean"] = weight.sum() * share
        parts["actor/tis_capped"] = (weight >= algorithm.tis_imp_ratio_cap).float().sum() * share
    parts["actor/pg_loss"] = (columns["weights"] * surrogate).sum()
    loss = surrogate
    if "ref_log_probs" in columns:
        kl = kl_estimate(log_probs, columns["ref_log_probs"], algorithm.kl_loss_type)
        parts["actor/kl"] = kl.sum() * share
        if not algorithm.use_kl_in_reward:
            loss = loss + algorithm.kl_loss_coef * kl
    if entropy is not None:
        parts["actor/entropy"] = entropy.sum() * share
        if algorithm.entropy_coeff != 0:
            loss = loss - algorithm.entropy_coeff * entropy
    return loss, parts
