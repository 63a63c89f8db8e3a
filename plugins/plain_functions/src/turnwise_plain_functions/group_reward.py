"""A group reward made from a function of the ended episodes of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from turnwise import EpisodeResult, structure
from turnwise.types import JsonObject
from turnwise_plain_functions.parts import is_async
from turnwise_rollout_buffer import GroupReward, GroupRewardConfig

OPTIONS = frozenset(attrs.fields_dict(GroupRewardConfig))
"""Options of every group reward; all others are the function's."""


class FunctionGroupReward(GroupReward):
    """Scores a group by a sync function, which the runtime calls in a thread."""

    def __init__(self, func: Callable[..., Any], options: JsonObject) -> None:
        super().__init__(structure(options, GroupRewardConfig))
        self._func = func

    def score_group(self, episodes: Sequence[EpisodeResult]) -> Any:
        return self._func(episodes)


class AsyncFunctionGroupReward(FunctionGroupReward):
    """Scores a group by an async function."""

    async def score_group(self, episodes: Sequence[EpisodeResult]) -> Any:
        return await self._func(episodes)


def group_reward(func: Callable[..., Any], options: JsonObject) -> GroupReward:
    """Return a group reward; the function gets the episodes and returns a number or a `Score` for each."""
    return AsyncFunctionGroupReward(func, options) if is_async(func) else FunctionGroupReward(func, options)
