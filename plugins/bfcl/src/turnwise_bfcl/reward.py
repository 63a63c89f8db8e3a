"""The reward `bfcl`: 1 for the calls that the leaderboard accepts, else 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from turnwise import Chat, Episode, Message, TrajectoryScore
from turnwise.errors import DataError
from turnwise_bfcl.checker import Call, check_calls


@frozen
class BfclReward:
    """
    Scores the model's first turn.

    Attributes:
        chat: reads the prompt, which must show the functions; None leaves that unchecked.
    """

    chat: Chat | None = field(repr=False)

    async def score(self, episode: Episode) -> TrajectoryScore:
        """
        Return 1 or 0.

        Raises:
            DataError: its task is not of the leaderboard, or the agent has shown the model none of the functions.
        """
        task = episode.task
        about: Any = task.extra.get("bfcl")
        where = f"task {task.uid!r} (row {task.sample_index})"
        if not isinstance(about, Mapping) or not {"category", "functions"} <= about.keys():
            raise DataError(f"{where} is of no category of BFCL; set data.path to bfcl:CATEGORY")
        name = next(iter(about["functions"]), "")
        if self.chat is not None and name not in _prompt_text(self.chat, episode):
            raise DataError(f"{where}: its prompt does not show the function {name!r}; use agent: tool_agent")
        calls = _first_calls(episode)
        good = [Call(name, arguments) for name, arguments in calls if arguments is not None]
        category = str(about["category"])
        if category.endswith("relevance"):
            right = bool(good) != category.endswith("irrelevance")
        else:
            right = len(good) == len(calls) and check_calls(about["functions"], good, task.ground_truth)
        return TrajectoryScore(value=float(right))


def _prompt_text(chat: Chat, episode: Episode) -> str:
    record = episode.trajectories[0]
    return chat.tokenizer.decode(record.input_ids[: record.num_prompt_tokens])


def _first_calls(episode: Episode) -> list[tuple[str, dict[str, Any] | None]]:
    """Return names and arguments of the calls of the first turn; None for arguments that are malformed."""
    before = sum(_is_turn(message) for message in episode.task.messages)
    turns = [message for message in episode.messages if _is_turn(message)][before:]
    # Of `tool_agent`: a malformed call may still have arguments that are JSON.
    malformed = {note["id"] for note in episode.memory.get("calls", ()) if note["error"]}
    return [
        (call["function"]["name"], None if call["id"] in malformed else _read(call["function"]["arguments"]))
        for call in (turns[0].get("tool_calls") or () if turns else ())
    ]


def _is_turn(message: Message) -> bool:
    return message.get("role") == "assistant"


def _read(arguments: object) -> dict[str, Any] | None:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        found = json.loads(str(arguments))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
