"""Changes of a batch's rewards before the advantages: the soft overlong punishment, and shuffling as a control."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from turnwise import RolloutBatch
from turnwise_grpo_trainer.config import OverlongConfig
from turnwise_grpo_trainer.objective.advantages import first_rows


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
    Add the soft overlong punishment to the rewards of the scored episodes.

    The length of a row counts its response: sampled tokens with the observations between them, because they count
    towards the limit that truncates it. Each line of rows (see `RolloutBatch.line_index`) has the punishment of its
    longest row, on the last sampled token of this row. So an estimator that takes each row of parallel paths as a line
    of its own punishes the rows that are too long, and no others. The reward of an episode, which the other estimators
    read, has the punishment of its longest row.

    Args:
        batch: B rows of E episodes.
        config: L_cache, L_max and the factor.
        response_length: L_max if the config has none.

    Returns:
        The batch, and metrics: the mean punishment, and the share of the scored episodes that got one.
    """
    lines, episodes, firsts = batch.line_index, batch.episode_index, first_rows(batch)
    num_lines = int(lines.max()) + 1 if len(batch) else 0
    max_length = response_length if config.max_length is None else config.max_length
    longest = batch.response_lens.new_zeros(num_lines).scatter_reduce(0, lines, batch.response_lens, "amax")
    scored = torch.zeros(len(firsts)).scatter_reduce(0, episodes, batch.scored.float(), "amax")
    punishments = overlong_punishment(longest, max_length=max_length, cache_length=config.cache_length)
    by_row = config.factor * punishments[lines] * scored[episodes]
    by_episode = torch.zeros(len(firsts)).scatter_reduce(0, episodes, by_row, "amin")
    rewards = batch.rm_scores.clone()
    for row, column in _last_actions(batch, prefer=batch.response_lens == longest[lines]):
        rewards[row, column] += by_row[row]
    count = max(1.0, float(scored.sum()))
    metrics = {
        "overlong/mean": float(by_episode.sum()) / count,
        "overlong/share": float((by_episode < 0).sum()) / count,
    }
    totals = batch.episode_rewards + by_episode[episodes]
    return evolve(batch, rm_scores=rewards, episode_rewards=totals), metrics


def shuffle_rewards(batch: RolloutBatch, seed: int) -> RolloutBatch:
    """
    Return the batch with the episodes' rewards permuted; each is on the last sampled token of each of its lines.

    This is a control: the rewards keep their distribution and no longer depend on the actions.
    """
    episodes, firsts = batch.episode_index, first_rows(batch)
    order = torch.randperm(len(firsts), generator=torch.Generator().manual_seed(seed))
    sources = firsts[order][episodes]
    rewards = batch.episode_rewards[sources]
    shuffled = torch.zeros_like(batch.rm_scores)
    for row, column in _last_actions(batch):
        shuffled[row, column] = rewards[row]
    return evolve(batch, rm_scores=shuffled, scored=batch.scored[sources], episode_rewards=rewards)


def _last_actions(batch: RolloutBatch, prefer: Tensor | None = None) -> list[tuple[int, int]]:
    """
    Return row and column of the last sampled token of each line that has one.

    With `prefer`, (B,) bool, it is the last one of these rows, if one of them has a sampled token.
    """
    columns = torch.arange(1, batch.response_length + 1) * (batch.response_mask > 0)
    last = columns.amax(1) if batch.response_length else columns.new_zeros(len(batch))
    preferred = [False] * len(batch) if prefer is None else prefer.tolist()
    chosen: dict[int, tuple[bool, int, int]] = {}
    for row, (line, end, wanted) in enumerate(zip(batch.line_index.tolist(), last.tolist(), preferred, strict=True)):
        if end:
            chosen[line] = max(chosen.get(line, (False, -1, -1)), (wanted, row, end - 1))
    return [(row, column) for _wanted, row, column in chosen.values()]
