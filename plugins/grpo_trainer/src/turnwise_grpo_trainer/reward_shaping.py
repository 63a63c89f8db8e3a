"""Changes of a batch's rewards before the advantages: the soft overlong punishment, and shuffling as a control."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from turnwise import RolloutBatch
from turnwise_grpo_trainer.advantages import first_rows
from turnwise_grpo_trainer.config import OverlongConfig


def overlong_punishment(lengths: Tensor, *, max_length: int, cache_length: int) -> Tensor:
    """
    Return the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13).

    With L_max and L_cache, the punishment R_length(y) of a response of |y| tokens is::

        0                                   if |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache  if L_max - L_cache < |y| <= L_max
        -1                                  if L_max < |y|

    Args:
        lengths: |y|, integers of any shape.
        max_length: L_max.
        cache_length: L_cache, at least 1.

    Returns:
        float32 of the same shape, from -1 to 0.
    """
    excess = lengths - (max_length - cache_length)
    return -(excess.double() / cache_length).clamp(0, 1).float()


def punish_overlong(
    batch: RolloutBatch, config: OverlongConfig, response_length: int
) -> tuple[RolloutBatch, dict[str, float]]:
    """
    Add the soft overlong punishment to the rewards of the scored episodes, on the last sampled token of each.

    The length of an episode is that of its longest row: response tokens with the observations between them, because
    they count towards the limit that truncates it.

    Args:
        batch: B rows of E episodes.
        config: L_cache, L_max and the factor.
        response_length: L_max if the config has none.

    Returns:
        The batch, and metrics: the mean punishment, and the share of the scored episodes that got one.
    """
    episodes, firsts = batch.episode_index, first_rows(batch)
    lengths = batch.response_lens.new_zeros(len(firsts)).scatter_reduce(0, episodes, batch.response_lens, "amax")
    max_length = response_length if config.max_length is None else config.max_length
    punishments = overlong_punishment(lengths, max_length=max_length, cache_length=config.cache_length)
    scored = torch.zeros(len(firsts)).scatter_reduce(0, episodes, batch.scored.float(), "amax")
    added = config.factor * punishments * scored
    rewards = batch.rm_scores.clone()
    for episode, place in _last_actions(batch).items():
        rewards[place] += added[episode]
    count = max(1.0, float(scored.sum()))
    metrics = {"overlong/mean": float(added.sum()) / count, "overlong/share": float((added < 0).sum()) / count}
    return evolve(batch, rm_scores=rewards, episode_rewards=batch.episode_rewards + added[episodes]), metrics


def shuffle_rewards(batch: RolloutBatch, seed: int) -> RolloutBatch:
    """
    Return the batch with the episodes' rewards permuted; each is placed on the episode's last sampled token.

    This is a control: the rewards keep their distribution and no longer depend on the actions.
    """
    episodes, firsts = batch.episode_index, first_rows(batch)
    order = torch.randperm(len(firsts), generator=torch.Generator().manual_seed(seed))
    sources = firsts[order][episodes]
    rewards = batch.episode_rewards[sources]
    shuffled = torch.zeros_like(batch.rm_scores)
    for row, column in _last_actions(batch).values():
        shuffled[row, column] = rewards[row]
    return evolve(batch, rm_scores=shuffled, scored=batch.scored[sources], episode_rewards=rewards)


def _last_actions(batch: RolloutBatch) -> dict[int, tuple[int, int]]:
    """Return row and column of the last sampled token of each episode that has one."""
    rows, columns = batch.response_mask.nonzero(as_tuple=True)  # in the order of the rows, so the last one wins
    places = zip(rows.tolist(), columns.tolist(), strict=True)
    return {int(batch.episode_index[row]): (row, column) for row, column in places}
