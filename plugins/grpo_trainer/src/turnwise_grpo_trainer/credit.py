"""From a batch's rewards to an advantage for each of its tokens, by the configured estimator."""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise import RolloutBatch, Status
from turnwise_grpo_trainer import advantages as estimators
from turnwise_grpo_trainer.config import AlgorithmConfig


@frozen(eq=False)
class Credit:
    """
    What a batch's tokens are worth. B rows, R response columns.

    Attributes:
        advantages: (B, R) float32, 0 on tokens that do not enter the loss.
        returns: (B, R) what the critic learns; None without one.
    """

    advantages: Tensor
    returns: Tensor | None = None


def valid_rows(batch: RolloutBatch) -> Tensor:
    """Return (B,) bool: rows that say something about the policy: scored, and not of a failed episode."""
    failed = torch.tensor([status is Status.FAILED for status in batch.column("status")], dtype=torch.bool)
    return batch.scored & ~failed


def trained_tokens(batch: RolloutBatch, *, mask_truncated: bool = False) -> Tensor:
    """Return (B, R) int64: 1 on the tokens that enter the loss."""
    valid = valid_rows(batch)
    if mask_truncated:
        valid &= ~torch.tensor([status is Status.TRUNCATED for status in batch.column("status")], dtype=torch.bool)
    return batch.loss_mask * valid[:, None]


def credit_of(
    batch: RolloutBatch,
    config: AlgorithmConfig,
    *,
    mask: Tensor,
    kl: Tensor | None = None,
    values: Tensor | None = None,
) -> Credit:
    """
    Return what the tokens of a batch are worth.

    Args:
        batch: B rows in groups; what follows the prompt has R columns.
        config: which estimator.
        mask: (B, R), 1 on tokens that enter the loss.
        kl: (B, R) log-ratio to the reference, taken off the rewards when given.
        values: (B, R) of the critic; needed by `gae`.
    """
    rewards, weight = batch.rm_scores, mask.to(torch.float32)
    if kl is not None:
        rewards = rewards - config.kl_loss_coef * kl * weight
    if config.adv_estimator == "gae":
        if values is None:
            raise ValueError("gae needs the critic's values")
        advantages, returns = estimators.gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
        return Credit(estimators.whitened(advantages, mask) if config.norm_adv else advantages, returns)
    if config.adv_estimator == "reinforce_plus_plus":
        return Credit(estimators.reinforce_plus_plus(rewards, mask, config.gamma))
    totals, groups, valid = rewards.sum(1), batch.group_index, valid_rows(batch)
    if config.adv_estimator == "rloo":
        outcome = estimators.rloo(totals, groups, valid)
    else:
        outcome = estimators.grpo(totals, groups, valid, norm_adv_by_std=config.adv_estimator == "grpo")
    return Credit(outcome[:, None] * weight)


def with_shuffled_rewards(batch: RolloutBatch, seed: int) -> RolloutBatch:
    """
    Return the batch with every row's total reward given to another row, on its last sampled token.

    A control: the rewards have the same distribution and say nothing about what was done.
    """
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    columns = torch.arange(batch.response_length).expand_as(batch.response_mask)
    last = torch.where(batch.response_mask.bool(), columns, -1).amax(1)
    totals = batch.rm_scores.sum(1)[order] * (last >= 0)
    shuffled = torch.zeros_like(batch.rm_scores).scatter(1, last.clamp(min=0)[:, None], totals[:, None])
    return evolve(batch, rm_scores=shuffled, scored=batch.scored[order])
