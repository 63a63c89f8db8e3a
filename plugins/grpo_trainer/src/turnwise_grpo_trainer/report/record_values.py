"""Values of a batch's tokens, by episode and record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from turnwise import EpisodeResult
from turnwise.types import TokenScore

if TYPE_CHECKING:
    from turnwise import RolloutBatch

Values = Sequence[NDArray[Any] | None]
"""Values of each trajectory's response tokens; None for one that is not trained."""


def split_by_record(
    episodes: Sequence[EpisodeResult],
    values: NDArray[Any],
    collate: Callable[[Sequence[EpisodeResult]], RolloutBatch],
    fill: float = 0,
) -> list[Values]:
    """
    Return values of a batch's response tokens by trajectory.

    A record with parallel paths can be several rows of a batch, and a row can hold its tokens in another order. So the
    tokens are numbered, and a batch of the numbers in place of the scores tells the place of each.

    Args:
        episodes: of the batch, in order.
        values: (B, R, *shape), of the batch's rows.
        collate: makes a batch of episodes, as the batch of the values was made.
        fill: of tokens that the policy did not sample in a trained record.

    Returns:
        For each episode, (R, *shape) values of each trajectory; None for one that is not trained.
    """
    batch = collate([_number_tokens(episode) for episode in episodes])
    numbers, owners = batch.rm_scores.long().numpy(), batch.episode_index.tolist()
    flat = [np.full((1 + _count_tokens(each), *values.shape[2:]), fill, values.dtype) for each in episodes]
    for owner, places, found in zip(owners, numbers, values, strict=True):
        flat[owner][places[places > 0]] = found[places > 0]
    return [_split(episode, own[1:]) for episode, own in zip(episodes, flat, strict=True)]


def _count_tokens(episode: EpisodeResult) -> int:
    return sum(record.num_response_tokens for record in episode.trajectories)


def _number_tokens(episode: EpisodeResult) -> EpisodeResult:
    """Return the episode with the number of each trained token as its score, from 1 through all trajectories."""
    scores, before = [], 1
    for record, trained in zip(episode.trajectories, episode.trained, strict=True):
        size = record.num_response_tokens
        mask = record.response_mask * int(trained)
        scores.append(TokenScore(values=tuple(((np.arange(size) + before) * mask).tolist())))
        before += size
    return evolve(episode, scores=tuple(scores))


def _split(episode: EpisodeResult, values: NDArray[Any]) -> Values:
    ends = np.cumsum([record.num_response_tokens for record in episode.trajectories], dtype=np.int64)
    parts = np.split(values, ends[:-1]) if len(ends) else []
    return [part if trained else None for part, trained in zip(parts, episode.trained, strict=True)]
