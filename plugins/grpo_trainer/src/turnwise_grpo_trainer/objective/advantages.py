"""
Advantage estimation: the advantage of each sampled token, from the rewards of a batch.

The estimators are pure functions of tensors. B rows, one or more for each episode; R response columns. An episode
counts once, however many rows it has: a group baseline has one reward for each episode, and time runs on through its
rows. Failed and unscored episodes are left out of every baseline, and their advantage is 0.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise import RolloutBatch, Status
from turnwise.errors import PluginError
from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective.hooks import AdvantageEstimator, Advantages
from turnwise_grpo_trainer.objective.timeline import Timeline

if TYPE_CHECKING:
    from turnwise_grpo_trainer.objective.path_ratios import PathRatios

EPSILON = 1e-6
"""Added to standard deviations, as in verl."""


# Estimators


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Return (E,) the sum over each entry's group. `values` is (E,); `groups` is (E,) int64 and counts from 0."""
    size = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(size).index_add(0, groups, values)[groups]


def grpo(rewards: Tensor, groups: Tensor, valid: Tensor, *, norm_adv_by_std: bool = True) -> Tensor:
    """
    Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1).

    The reward minus the group's mean, divided by the group's standard deviation. Without the division these are the
    advantages of Dr. GRPO (arXiv:2503.20783), which removes the bias towards questions that are too easy or too hard.

    Args:
        rewards: (E,) float, one for each episode.
        groups: (E,) int64, the group of each episode.
        valid: (E,) bool, whether the episode has a reward.
        norm_adv_by_std: divide by the sample standard deviation.

    Returns:
        (E,); 0 in a group of one and in a group with equal rewards.
    """
    # In float32 the mean of equal rewards is off by rounding, and the division would amplify that to an advantage.
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

    The reward minus the mean reward of the other episodes of the group. Shapes as in `grpo`; 0 in a group of one.
    """
    count = group_sums(valid.to(rewards.dtype), groups)
    centred = grpo(rewards, groups, valid, norm_adv_by_std=False)
    return centred * count / (count - 1).clamp(min=1)


def move_to_actions(rewards: Tensor, mask: Tensor) -> Tensor:
    """
    Move the rewards of observed tokens to the sampled token before them.

    Args:
        rewards: (B, R) float.
        mask: (B, R), 1 on sampled tokens.

    Returns:
        (B, R), 0 wherever the mask is 0. A reward without a sampled token before it is dropped.
    """
    columns = torch.arange(rewards.shape[1], device=rewards.device).expand_as(rewards)
    last = torch.where(mask.bool(), columns, -1).cummax(1).values if rewards.shape[1] else columns
    moved = torch.zeros_like(rewards)
    return moved.scatter_add(1, last.clamp(min=0), rewards * (last >= 0))


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """
    Return (B, R) the discounted sum of rewards from each sampled token to the end; 0 on other tokens.

    Only sampled tokens are time steps: tokens of tools and users are not discounted.
    """
    rewards = move_to_actions(rewards, mask)
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
        rewards: (B, R) float, including the KL penalty.
        mask: (B, R), 1 on tokens in the loss.
        gamma: discount.
    """
    return whiten(discounted_returns(rewards, mask, gamma), mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """
    Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    Args:
        rewards: (B, R) float.
        values: (B, R) float, the critic's value of the state in which each token was sampled.
        mask: (B, R), 1 on tokens in the loss; only these are time steps.
        gamma: discount.
        lam: 0 gives the one-step error, 1 the return minus the value.

    Returns:
        The advantages (B, R), not normalised, and the critic's targets (B, R); both 0 where the mask is 0.
    """
    rewards = move_to_actions(rewards, mask)
    advantages = torch.zeros_like(rewards)
    next_value, running = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        acted, value = mask[:, column].bool(), values[:, column]
        delta = rewards[:, column] + gamma * next_value - value
        running = torch.where(acted, delta + gamma * lam * running, running)
        next_value = torch.where(acted, value, next_value)
        advantages[:, column] = running * acted
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (B, R) values with mean 0 and variance 1 over the entries where the mask is 1, and 0 elsewhere."""
    exact, weight = values.double(), mask.double()  # float64 for the same reason as in `grpo`
    count = weight.sum()
    mean = (exact * weight).sum() / count.clamp(min=1)
    variance = (((exact - mean) * weight) ** 2).sum() / (count - 1).clamp(min=1)
    return ((exact - mean) / (variance.sqrt() + EPSILON) * weight).to(values.dtype)


# From a batch to advantages


def first_rows(batch: RolloutBatch) -> Tensor:
    """Return (E,) int64: the first row of each episode, in the order of `RolloutBatch.episode_index`."""
    episodes = batch.episode_index
    firsts = torch.full((int(episodes.max()) + 1 if len(batch) else 0,), len(batch))
    return firsts.scatter_reduce(0, episodes, torch.arange(len(batch)), "amin")


def valid_rows(batch: RolloutBatch) -> Tensor:
    """Return (B,) bool: scored rows of episodes that did not fail."""
    failed = torch.tensor([status is Status.FAILED for status in batch.column("status")], dtype=torch.bool)
    return batch.scored & ~failed


def compute_loss_mask(batch: RolloutBatch, *, mask_truncated: bool = False) -> Tensor:
    """Return (B, R) int64, 1 on the tokens in the loss; with `mask_truncated`, truncated rows have none."""
    valid = valid_rows(batch)
    if mask_truncated:
        valid &= ~torch.tensor([status is Status.TRUNCATED for status in batch.column("status")], dtype=torch.bool)
    return batch.loss_mask.long() * valid[:, None]


def estimate_advantages(  # noqa: PLR0913 - independent inputs, by name
    batch: RolloutBatch,
    config: AlgorithmConfig,
    estimator: AdvantageEstimator,
    *,
    mask: Tensor,
    kl: Tensor | None = None,
    values: Tensor | None = None,
    leave_out: Callable[[Tensor], PathRatios] | None = None,
) -> Advantages:
    """
    Return the advantages of a batch.

    Args:
        batch: B rows of E episodes in groups, with R response columns.
        config: of the algorithm.
        estimator: the one that the config names.
        mask: (B, R), 1 on tokens in the loss.
        kl: (B, R) log-ratio to the reference, subtracted from the rewards if given.
        values: (B, R) values of the critic; required by `gae`.
        leave_out: measures the paths of rows, for `path_credit`.

    Raises:
        ValueError: the estimator is `gae` and `values` is None.
        PluginError: the estimator returned another shape.
    """
    weight = mask.to(torch.float32)
    penalty = torch.zeros_like(weight) if kl is None else config.kl_loss_coef * kl * weight
    episodes, firsts = batch.episode_index, first_rows(batch)
    found = estimator.estimate(
        rewards=batch.episode_rewards[firsts].index_add(0, episodes, -penalty.sum(1)),
        groups=batch.group_index[firsts],
        valid=valid_rows(batch)[firsts],
        token_rewards=batch.rm_scores - penalty,
        mask=mask,
        episodes=episodes,
        timeline=Timeline.from_batch(batch),
        algorithm=config,
        values=values,
        leave_out=leave_out,
    )
    name = config.adv_estimator.name
    if isinstance(found, Advantages):
        return Advantages(_spread(found.values, episodes, weight, name) * weight, found.returns)
    return Advantages(_spread(found, episodes, weight, name) * weight)


def _spread(found: Tensor, episodes: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return (B, R) advantages of an estimator, which returned one for each episode or each token."""
    num_episodes = int(episodes.max()) + 1 if len(episodes) else 0
    if found.shape == (num_episodes,):
        return found.float()[episodes][:, None].expand_as(weight)
    if found.shape != weight.shape:
        raise PluginError(
            f"advantage {name!r} returned the shape {tuple(found.shape)}; expected ({num_episodes},) for the episodes"
            f" or {tuple(weight.shape)} for the response tokens"
        )
    return found.float()
