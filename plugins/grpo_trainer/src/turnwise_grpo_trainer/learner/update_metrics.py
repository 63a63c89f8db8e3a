"""Metrics of an update: means over its tokens, its distance to the rollout, and how far it moves the policy."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from turnwise_grpo_trainer.objective.losses import kl_estimate, log_prob_gap
from turnwise_grpo_trainer.objective.rows import TokenRows

Sums = dict[str, float]


def find_measured(rows: TokenRows, *, all_rows: bool = False) -> Tensor:
    """
    Return (N,) the tokens that metrics cover, 1 on each: those in the loss whose rows have an advantage, or all in it.

    Rows without one often need no forward pass. They are left out whatever the loss is, so that a metric means the same
    with every loss. In a batch without any advantage, these are the tokens of the first row in the loss.
    """
    mask, index = rows["loss_mask"], rows.row_index
    if all_rows:
        return mask
    effect = torch.zeros(len(rows)).index_add_(0, index, (rows["advantages"] * mask).abs())
    if not effect.any() and len(rows.targets):
        effect[index[rows.targets[0]]] = 1
    return mask * (effect != 0)[index]


def drop_unmeasured(rows: TokenRows) -> TokenRows:
    """
    Remove rows without gradient from the loss mask: in a group with equal rewards, all advantages are 0.

    One row always stays: the optimizer needs a gradient, if of 0, for its momentum and decay.
    """
    kept = torch.zeros(len(rows)).index_add_(0, rows.row_index, rows["measured"].float())
    kept[rows.row_index[rows.targets[0]]] += float(not kept.any())
    return rows.with_columns(loss_mask=rows["loss_mask"] * (kept > 0)[rows.row_index])


@define
class StepMetrics:
    """
    Metrics of one mini-batch.

    Attributes:
        num_tokens: number of measured tokens.
        values: sums over the measured tokens.
        others: values of the whole optimizer step.
        forwarded_tokens: tokens of the forward and backward passes of all processes, pads too.
        row_tokens: tokens of the rows in these passes.
    """

    num_tokens: int = 0
    values: Sums = field(factory=dict)
    others: Sums = field(factory=dict)
    forwarded_tokens: int = 0
    row_tokens: int = 0

    def add(self, measured: Tensor, values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        """Add a micro-batch: (M,) bool which of its tokens are measured, (M,) values, and scalars."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value.detach()[measured].sum())
        for name, value in others.items():
            self.others[name] = self.others.get(name, 0.0) + float(value.detach())

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the micro-batches of all processes."""
        for sums in (self.values, self.others):
            names = sorted(sums)
            total = all_reduce(torch.tensor([sums[name] for name in names], dtype=torch.float64))
            sums.update(zip(names, total.tolist(), strict=True))

    @property
    def approx_kl(self) -> float:
        """Mean KL of a measured token from the policy before the update; 0 without one."""
        return self.values.get("actor/approx_kl", 0.0) / max(self.num_tokens, 1)


def average(steps: Sequence[StepMetrics]) -> Sums:
    """Return the means over all measured tokens of some mini-batches, and of the other values over mini-batches."""
    num_tokens = max(sum(step.num_tokens for step in steps), 1)
    values = _add_up([step.values for step in steps], num_tokens)
    if "importance/mean" in values:
        values["importance/ess"] = effective_share(values.pop("importance/mean"), values.pop("importance/square"))
    return values | _add_up([step.others for step in steps], len(steps))


def count_tokens(steps: Sequence[StepMetrics]) -> Sums:
    """Return how many tokens the passes of some mini-batches computed, and how many their rows have."""
    return {
        "update/forwarded_tokens": float(sum(step.forwarded_tokens for step in steps)),
        "update/row_tokens": float(sum(step.row_tokens for step in steps)),
    }


def _add_up(sums: Sequence[Sums], count: int) -> Sums:
    names = dict.fromkeys(name for each in sums for name in each)
    return {name: sum(each.get(name, 0.0) for each in sums) / count for name in names}


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
    """
    Compare with the rollout's log-probabilities, on measured tokens of this weight version or, without any, on all.

    Without a measured token there is no difference to report, and a 0 would look like a perfect one.

    Args:
        rows: with the column `measured`.
        log_probs: (N,) of the policy before the update, on the measured tokens.
        version: weight version of the policy.
    """
    targets = rows["measured"].nonzero().squeeze(1)
    fresh = targets[rows["weight_versions"][targets] == version]
    chosen = fresh if len(fresh) else targets
    counts = {"gap/tokens": float(len(chosen))}
    if not len(chosen):
        return counts
    gap = log_prob_gap(log_probs[chosen], rows["rollout_log_probs"][chosen])
    return counts | {
        "gap/mean": gap.mean,
        "gap/max": gap.max,
        "gap/max_relative": gap.max_relative,
        "gap/kl": gap.kl,
        "gap/fresh": len(fresh) / len(targets),
    }
