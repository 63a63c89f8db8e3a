"""
The agent: the model opens a block, explores it in paths that do not see each other, sums up, and goes on.

What the model samples is an action; the tags that it does not write are forced. Where blocks and paths begin and end is
known from the record and never looked for in token ids, so tags in a prompt, or astray in a path, change nothing. What
a checkpoint needs besides the record is in `Episode.memory`, as JSON values:

    blocks       blocks that were joined
    spoke        whether the last message is the model's
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from turnwise import Episode, Resources, SamplingParams, State
from turnwise.errors import BudgetExhausted, ConfigError, EpisodeEnd
from turnwise.layout import Objective
from turnwise.trajectory import Path
from turnwise_parallel_thinking.config import ParallelThinkingConfig
from turnwise_parallel_thinking.tag_ids import tag_ids

_SUMMARY_AND_ANSWER = 3
"""Tokens that are kept back when a block opens: one of a summary, its closing tag, and one of the answer."""


class Phase(StrEnum):
    """What the model is asked for next."""

    MAIN = "main"
    PATHS = "paths"
    SUMMARY = "summary"


class ParallelThinking:
    """
    Serves any number of episodes at once and keeps nothing about any.

    Args:
        config: paths, blocks, tags and limits.
        resources: with a chat template.

    Raises:
        ConfigError: there is no chat template, or a tag is not one token.
    """

    def __init__(self, config: ParallelThinkingConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'parallel_thinking' needs a tokenizer: the run needs a model with a chat template")
        self._config = config
        self._chat = resources.chat
        self._ids = tag_ids(config.tags, resources.chat.tokenizer)

    async def step(self, episode: Episode) -> State | str:
        """Make one transition."""
        if self._config.objective != "auto":
            episode.objective = Objective(self._config.objective)
        if episode.state == State.PENDING:
            return self._begin(episode)
        try:
            match episode.state:
                case Phase.MAIN:
                    return await self._main(episode)
                case Phase.PATHS:
                    return await self._paths(episode)
                case Phase.SUMMARY:
                    return await self._summary(episode)
        finally:
            # What a budget or a deadline cut counts for the reward as far as it went.
            self._speak(episode)
        raise ValueError(f"parallel_thinking has no state {episode.state!r}")

    def _begin(self, episode: Episode) -> str:
        if self._config.prompt_suffix:
            _append(episode.messages, self._config.prompt_suffix)
        episode.begin(self._chat.prompt(episode.messages))
        episode.memory.update(blocks=0, spoke=False)
        return Phase.MAIN

    async def _main(self, episode: Episode) -> State | str:
        """Let the model write until it opens a block that it may open, or to its end."""
        # One token goes to the tag that opens the block.
        may_fork = episode.memory["blocks"] < self._config.max_blocks and self._share(episode.remaining_tokens - 1) > 0
        stops = (self._ids.block,) if may_fork else ()
        result = await episode.generate(stop_token_ids=stops)
        if not may_fork or result.stop_reason != self._ids.block:
            return State.TERMINATED
        if self._share(episode.remaining_tokens) < 1:
            raise BudgetExhausted("no block fits any more that leaves room for an answer")
        for path in episode.trajectory.fork(self._config.num_paths):
            episode.force(self._ids.path, record=path)
        return Phase.PATHS

    def _share(self, room: int) -> int:
        """Return how many tokens each path may sample when a block opens with this much room."""
        num_paths = self._config.num_paths
        # A path has two tags besides what it samples.
        left = room - 2 * num_paths - len(self._ids.join) - _SUMMARY_AND_ANSWER
        return min(self._config.max_path_tokens, left // num_paths)

    async def _paths(self, episode: Episode) -> str:
        """Let every path go on to its end, all at once, and join them."""
        paths = episode.trajectory.open_paths
        share = self._share(episode.remaining_tokens + len(paths) * len(self._ids.path))
        await _all([self._path(episode, path, share) for path in paths])
        episode.trajectory.join(paths)
        episode.force(self._ids.join)
        episode.memory["blocks"] += 1
        return Phase.SUMMARY

    async def _path(self, episode: Episode, path: Path, max_tokens: int) -> None:
        result = await episode.generate(
            self._path_sampling(episode, path.index),
            record=path,
            max_tokens=max_tokens,
            stop_token_ids=(self._ids.end_path,),
            drop_stops=True,
        )
        if result.stop_reason != self._ids.end_path:
            episode.force(np.array([self._ids.end_path], np.int32), record=path)

    def _path_sampling(self, episode: Episode, index: int) -> SamplingParams:
        config = self._config
        temperature = config.validation_path_temperature if episode.validation else config.path_temperature
        sampling = episode.sampling if temperature is None else episode.sampling.with_(temperature=temperature)
        return sampling.with_(seed=config.path_seeds[index]) if config.path_seeds else sampling

    async def _summary(self, episode: Episode) -> str:
        """Let the model sum up, and leave room for an answer."""
        room = episode.remaining_tokens - (_SUMMARY_AND_ANSWER - 1)
        if room < 1:
            raise BudgetExhausted("no summary fits any more that leaves room for an answer")
        limit = self._config.max_summary_tokens
        result = await episode.generate(
            max_tokens=room if limit is None else min(room, limit),
            stop_token_ids=(self._ids.end_summary,),
            drop_stops=True,
        )
        if result.stop_reason != self._ids.end_summary:
            episode.force(np.array([self._ids.end_summary], np.int32))
        return Phase.MAIN

    def _speak(self, episode: Episode) -> None:
        """Keep the model's message as far as it is written."""
        trajectory = episode.trajectory
        ids = np.concatenate([trajectory.response_ids, *(path.own_ids for path in trajectory.open_paths)])
        if not len(ids):
            return
        if episode.memory["spoke"]:
            episode.messages.pop()
        episode.messages.append({"role": "assistant", "content": self._chat.text(ids)})
        episode.memory["spoke"] = True


def _append(messages: list[Any], text: str) -> None:
    """Append a text to the last user message."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "user":
            content = messages[index].get("content") or ""
            longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            messages[index] = {**messages[index], "content": longer}
            return
    messages.append({"role": "user", "content": text})


async def _all(paths: Sequence[Coroutine[Any, Any, None]]) -> None:
    """
    Await all paths, and then raise what was raised, a failure rather than a signal.

    A task group alone would cancel the others at the first signal, and what they had sampled would be lost.
    """
    raised: list[Exception] = []

    async def run(path: Coroutine[Any, Any, None]) -> None:
        try:
            await path
        except Exception as error:  # noqa: BLE001 - raised below, when all have come back
            raised.append(error)

    async with asyncio.TaskGroup() as group:
        for path in paths:
            group.create_task(run(path))
    failures = [error for error in raised if not isinstance(error, EpisodeEnd)]
    if raised:
        raise (failures or raised)[0]
