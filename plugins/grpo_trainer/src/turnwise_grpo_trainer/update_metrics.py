"""Metrics of an update: its distance to the rollout, its length, and the share of the batch that weights leave."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch
from torch import Tensor

from turnwise_grpo_trainer.losses import kl_estimate, log_prob_gap
from turnwise_grpo_trainer.rows import TokenRows


def effective_share(mean: float, mean_square: float) -> float:
    """Return Kish's effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2), 1 at most."""
    return mean**2 / mean_square if mean_square else 0.0


def spread_rows(rows: TokenRows, limit: int) -> TokenRows:
    """Return at most `limit` rows with a token in the loss, evenly spaced."""
    trained = torch.bincount(rows.row_index[rows.targets], minlength=len(rows)).nonzero().squeeze(1)
    count = min(limit, len(trained))
    return rows.select(trained[torch.arange(count) * len(trained) // max(count, 1)].tolist())


def shift_metrics(rows: TokenRows, old: Tensor, new: Tensor) -> dict[str, float]:
    """
    Return the KL of the old policy to the new one, on samples of the old one (k3 of Schulman 2020).

    Args:
        rows: at least one has a token in the loss.
        old: (N,) log-probabilities before the update.
        new: (N,) log-probabilities after it.
    """
    targets = rows.targets
    each = kl_estimate(old[targets], new[targets], "k3")
    num_rows = len(torch.unique(rows.row_index[targets]))
    return {"policy/kl": float(each.mean()), "policy/nats": float(each.sum()) / num_rows}


def gap_metrics(rows: TokenRows, log_probs: Tensor, version: int) -> dict[str, float]:
    """Compare with the rollout's log-probabilities, on tokens of this weight version or, without any, on all."""
    targets = rows.targets
    fresh = targets[rows["weight_versions"][targets] == version]
    chosen = fresh if len(fresh) else targets
    gap = log_prob_gap(log_probs[chosen], rows["rollout_log_probs"][chosen])
    return {
        "gap/mean": gap.mean,
        "gap/max": gap.max,
        "gap/max_relative": gap.max_relative,
        "gap/kl": gap.kl,
        "gap/tokens": float(gap.num_tokens),
        "gap/fresh": len(fresh) / max(len(targets), 1),
    }
