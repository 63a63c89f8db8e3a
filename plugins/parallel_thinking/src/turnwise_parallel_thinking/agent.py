"""
The agent `parallel_thinking`: the model opens a block, explores it in paths that do not see each other, and sums up.

Sampled tokens are actions, and tags that the model does not write are forced. The record, and never the token ids, says
where blocks and paths start and end, so tags in a prompt, or in the wrong place in a path, change nothing. A checkpoint
needs the record and `Episode.memory`, which holds JSON values:

    blocks       blocks that are joined
    spoke        whether the last message is the model's
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from turnwise import Episode, Message, Resources, SamplingParams, State, Task
from turnwise.errors import BudgetExhausted, ConfigError, DataError, EpisodeEnd
from turnwise.layout import Objective
from turnwise.messages import encode_beside_loop
from turnwise.protocols import PictureChat
from turnwise.record.trajectory import Path
from turnwise.types import MediaTokens, TokenArray
from turnwise_parallel_thinking.config import ParallelThinkingConfig
from turnwise_parallel_thinking.tag_ids import encode_tags

_SUMMARY_AND_ANSWER = 3
"""Tokens that stay reserved when a block opens: one of a summary, its closing tag, and one of the answer."""


class Phase(StrEnum):
    """The next part that the model writes."""

    MAIN = "main"
    PATHS = "paths"
    SUMMARY = "summary"


class ParallelThinking:
    """
    Runs blocks of paths. It keeps no state, so one agent serves concurrent episodes.

    Args:
        config: paths, blocks, tags and limits.
        resources: chat template.

    Raises:
        ConfigError: the run has no chat template, or a tag is not one token.
    """

    def __init__(self, config: ParallelThinkingConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'parallel_thinking' needs a tokenizer: the run needs a model with a chat template")
        self._config = config
        self._chat = chat = resources.chat
        self._render = chat.picture_prompt if isinstance(chat, PictureChat) else chat.prompt
        self._ids = encode_tags(config.tags, resources.chat.tokenizer)

    async def step(self, episode: Episode) -> State | str:
        if self._config.objective != "auto":
            episode.objective = Objective(self._config.objective)
        if episode.state == State.PENDING:
            return await self._start(episode)
        try:
            match episode.state:
                case Phase.MAIN:
                    return await self._write_main(episode)
                case Phase.PATHS:
                    return await self._write_paths(episode)
                case Phase.SUMMARY:
                    return await self._write_summary(episode)
        finally:
            # The reward also reads a message that a budget or a deadline has truncated.
            self._update_message(episode)
        raise ValueError(f"parallel_thinking has no state {episode.state!r}")

    async def _start(self, episode: Episode) -> str:
        messages = episode.messages
        self._add_suffix(messages)
        prompt = await encode_beside_loop(messages, partial(self._prompt, messages))
        if isinstance(prompt, MediaTokens) and episode.objective is Objective.EXACT:
            episode.objective = Objective.EXPANDED
        episode.begin(prompt)
        episode.memory.update(blocks=0, spoke=False)
        return Phase.MAIN

    def first_prompt(self, task: Task) -> TokenArray | MediaTokens:
        """Return the prompt that `step` begins with; see `turnwise.protocols.PromptingAgent`."""
        messages = list(task.messages)
        self._add_suffix(messages)
        return self._prompt(messages)

    def _prompt(self, messages: Sequence[Message]) -> TokenArray | MediaTokens:
        prompt = self._render(messages)
        if isinstance(prompt, MediaTokens) and self._config.objective == "exact":
            reason = "no engine has parallel paths in a context with a picture"
            raise DataError(f"the prompt has pictures, and {reason}; set agent.objective: expanded, or auto")
        return prompt

    def _add_suffix(self, messages: list[Message]) -> None:
        if self._config.prompt_suffix:
            _append_to_user_message(messages, self._config.prompt_suffix)

    async def _write_main(self, episode: Episode) -> State | str:
        """Let the model write until it opens an allowed block or ends its turn."""
        # The tag that opens the block takes one token.
        path_budget = self._path_budget(episode.remaining_tokens - 1)
        may_fork = episode.memory["blocks"] < self._config.max_blocks and path_budget > 0
        stops = (self._ids.block,) if may_fork else ()
        result = await episode.generate(stop_token_ids=stops)
        if not may_fork or result.stop_reason != self._ids.block:
            return State.TERMINATED
        if self._path_budget(episode.remaining_tokens) < 1:
            raise BudgetExhausted("the remaining tokens have no room for a block and an answer")
        for path in episode.trajectory.fork(self._config.num_paths):
            episode.force(self._ids.path, record=path)
        return Phase.PATHS

    def _path_budget(self, num_tokens: int) -> int:
        """Return the number of tokens that each path may sample if a block opens with `num_tokens` left."""
        num_paths = self._config.num_paths
        # A path has two tags besides its sampled tokens.
        left = num_tokens - 2 * num_paths - len(self._ids.join) - _SUMMARY_AND_ANSWER
        return min(self._config.max_path_tokens, left // num_paths)

    async def _write_paths(self, episode: Episode) -> str:
        """Complete all paths concurrently, and join them."""
        paths = episode.trajectory.open_paths
        max_tokens = self._path_budget(episode.remaining_tokens + len(paths) * len(self._ids.path))
        await _await_all([self._write_path(episode, path, max_tokens) for path in paths])
        episode.trajectory.join(paths)
        episode.force(self._ids.join)
        episode.memory["blocks"] += 1
        return Phase.SUMMARY

    async def _write_path(self, episode: Episode, path: Path, max_tokens: int) -> None:
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

    async def _write_summary(self, episode: Episode) -> str:
        """Let the model write the summary, and leave room for an answer."""
        room = episode.remaining_tokens - (_SUMMARY_AND_ANSWER - 1)
        if room < 1:
            raise BudgetExhausted("the remaining tokens have no room for a summary and an answer")
        limit = self._config.max_summary_tokens
        result = await episode.generate(
            max_tokens=room if limit is None else min(room, limit),
            stop_token_ids=(self._ids.end_summary,),
            drop_stops=True,
        )
        if result.stop_reason != self._ids.end_summary:
            episode.force(np.array([self._ids.end_summary], np.int32))
        return Phase.MAIN

    def _update_message(self, episode: Episode) -> None:
        """Replace the model's message by its text so far."""
        trajectory = episode.trajectory
        ids = np.concatenate([trajectory.response_ids, *(path.own_ids for path in trajectory.open_paths)])
        if not len(ids):
            return
        if episode.memory["spoke"]:
            episode.messages.pop()
        episode.messages.append({"role": "assistant", "content": self._chat.text(ids)})
        episode.memory["spoke"] = True


def _append_to_user_message(messages: list[Any], text: str) -> None:
    """Append a text to the last user message, or add one if there is none."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "user":
            content = messages[index].get("content") or ""
            longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            messages[index] = {**messages[index], "content": longer}
            return
    messages.append({"role": "user", "content": text})


async def _await_all(paths: Sequence[Coroutine[Any, Any, None]]) -> None:
    """
    Await all paths, and then raise the first failure, or the first signal that ends the episode.

    A task group alone would cancel the other paths at the first signal, and their sampled tokens would be lost.
    """
    raised: list[Exception] = []

    async def run(path: Coroutine[Any, Any, None]) -> None:
        try:
            await path
        except Exception as error:  # noqa: BLE001 - raised below, when all paths have ended
            raised.append(error)

    async with asyncio.TaskGroup() as group:
        for path in paths:
            group.create_task(run(path))
    failures = [error for error in raised if not isinstance(error, EpisodeEnd)]
    if raised:
        raise (failures or raised)[0]
