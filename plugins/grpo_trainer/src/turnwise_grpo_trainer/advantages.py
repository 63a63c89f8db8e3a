"""
Advantage estimators: what each sampled token is worth, from the rewards of a batch.

Pure functions of tensors. B rows, one per trajectory; R response columns. Rows that say nothing, because they failed or
were not scored, are left out of every baseline and get 0.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to standard deviations, as verl does."""


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Return (B,) the sum over the rows of each row's group. `values` is (B,), `groups` (B,) int64 from 0."""
    size = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(size).index_add(0, groups, values)[groups]


def grpo(rewards: Tensor, groups: Tensor, valid: Tensor, *, norm_adv_by_std: bool = True) -> Tensor:
    """
    Group relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1).

    The reward minus the mean of its group, over the group's standard deviation. Without the division these are the
    advantages of Dr. GRPO (arXiv:2503.20783), which removes the bias towards questions that are too easy or too hard.

    It is computed in float64: in float32 the mean of equal rewards is off by rounding, which the division would make an
    advantage of.

    Args:
        rewards: (B,) float.
        groups: (B,) int64, the group of each row.
        valid: (B,) bool, rows that have a reward.
        norm_adv_by_std: divide by the sample standard deviation.

    Returns:
        (B,); 0 in a group of one, and in one of equal rewards.
    """
    exact = rewards.double()
    weight = valid.double()
    count = group_sums(weight, groups)
    mean = group_sums(exact * weight, groups) / count.clamp(min=1)
    centred = (exact - mean) * weight * (count > 1)
    if norm_adv_by_std:
        variance = group_sums(centred**2, groups) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPSILON)
    return centred.to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """
    Reinforce leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    The reward minus the mean of the others of its group. Shapes as in `grpo`; 0 in a group of one.
    """
    count = group_sums(valid.to(rewards.dtype), groups)
    centred = grpo(rewards, groups, valid, norm_adv_by_std=False)
    return centred * count / (count - 1).clamp(min=1)


def on_actions(rewards: Tensor, mask: Tensor) -> Tensor:
    """
    Move rewards that sit on tokens nobody sampled to the sampled token before them.

    Args:
        rewards: (B, R) float.
        mask: (B, R), 1 on sampled tokens.

    Returns:
        (B, R), 0 wherever the mask is 0. What has no sampled token before it is lost.
    """
    columns = torch.arange(rewards.shape[1], device=rewards.device).expand_as(rewards)
    last = torch.where(mask.bool(), columns, -1).cummax(1).values if rewards.shape[1] else columns
    moved = torch.zeros_like(rewards)
    return moved.scatter_add(1, last.clamp(min=0), rewards * (last >= 0))


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """
    Return (B, R) the discounted sum of the rewards from each sampled token on, 0 elsewhere.

    Only sampled tokens are steps: what a tool or a user wrote takes no time.
    """
    rewards = on_actions(rewards, mask)
    returns, running = torch.zeros_like(rewards), rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        acted = mask[:, column].bool()
        running = torch.where(acted, rewards[:, column] + gamma * running, running)
        returns[:, column] = running * acted
    return returns


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """
    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): returns, normalised over all sampled tokens of the batch.

    Args:
        rewards: (B, R) float, the KL penalty included.
        mask: (B, R), 1 on tokens that enter the loss.
        gamma: discount.
    """
    return whitened(discounted_returns(rewards, mask, gamma), mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """
    Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    Args:
        rewards: (B, R) float.
        values: (B, R) float, the critic's value of the state in which each token was sampled.
        mask: (B, R), 1 on tokens that enter the loss; only these are steps.
        gamma: discount.
        lam: 0 is the one-step error, 1 the return minus the value.

    Returns:
        The advantages (B, R), not normalised, and the returns that the critic learns; both 0 where the mask is 0.
    """
    rewards = on_actions(rewards, mask)
    advantages = torch.zeros_like(rewards)
    next_value, running = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        acted, value = mask[:, column].bool(), values[:, column]
        delta = rewards[:, column] + gamma * next_value - value
        running = torch.where(acted, delta + gamma * lam * running, running)
        next_value = torch.where(acted, value, next_value)
        advantages[:, column] = running * acted
    return advantages, (advantages + values) * mask


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Return (B, R) values of mean 0 and variance 1 over the entries where the mask is 1, and 0 elsewhere."""
    exact, weight = values.double(), mask.double()  # as in `grpo`
    count = weight.sum()
    mean = (exact * weight).sum() / count.clamp(min=1)
    variance = (((exact - mean) * weight) ** 2).sum() / (count - 1).clamp(min=1)
    return ((exact - mean) / (variance.sqrt() + EPSILON) * weight).to(values.dtype)
