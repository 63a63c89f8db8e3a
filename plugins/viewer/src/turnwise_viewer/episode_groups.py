"""Groups of a run: the episodes of a task at a step, their rewards, and the difference between best and worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_viewer.episode_index import EpisodeIndex, Filter, group_numbers

SORTS = ("order", "mean", "spread")


Advantages = Callable[[Sequence[int]], Sequence[float | None]]
"""Returns the mean advantage of each episode, by number."""


def list_groups(index: EpisodeIndex, wanted: Filter, page: slice, sort: str, advantages: Advantages) -> JsonDict:
    """
    Return a page of groups, and their `total` number.

    A group has its `episodes`, the `mean`, `min`, `max` and `std` (over the group) of their rewards, and `no_variance`:
    whether it has at least two rewards and all are equal, so that it has no gradient under GRPO. Each episode has
    `difference`, its reward minus the mean, and `advantage`, the mean over its sampled tokens in a training.
    """
    if sort not in SORTS:
        raise DataError(f"sort: {sort!r} is none of {', '.join(SORTS)}")
    groups = group_numbers(index, index.select(wanted)) if len(index) else []
    rewards = index.column("reward") if len(index) else np.zeros(0)
    if sort != "order":
        groups.sort(key=lambda numbers: _rank(rewards[numbers], sort))
    return {
        "total": len(groups),
        "groups": [describe_group(index, each, advantages) for each in groups[page]],
    }


@np.errstate(over="ignore", invalid="ignore")
def _rank(rewards: NDArray[Any], sort: str) -> float:
    scored = rewards[~np.isnan(rewards)]
    if not len(scored):
        return float("inf")
    return float(scored.mean() if sort == "mean" else scored.min() - scored.max())


# A reward can be as large as a float or not finite; a figure that no float can hold is null on the page, which says it.
@np.errstate(over="ignore", invalid="ignore")
def describe_group(index: EpisodeIndex, numbers: NDArray[np.int64], advantages: Advantages) -> JsonDict:
    """Return the group of some episodes, see `list_groups`."""
    rewards = index.column("reward")[numbers]
    scored = rewards[~np.isnan(rewards)]
    episodes = index.rows(numbers)
    mean = float(scored.mean()) if len(scored) else None
    for episode, advantage in zip(episodes, advantages(numbers.tolist()), strict=True):
        episode["advantage"] = advantage
        reward = episode["reward"]
        episode["difference"] = None if reward is None or mean is None else reward - mean
    first = episodes[0]
    figures = {name: float(getattr(scored, name)()) if len(scored) else None for name in ("min", "max", "std")}
    return {
        **{name: first[name] for name in ("uid", "global_step", "validation", "sample_index", "data_source")},
        "mean": mean,
        **figures,
        "no_variance": bool(len(scored) > 1 and scored.min() == scored.max()),
        "episodes": episodes,
    }
