"""The reward `bfcl`: 1 for the calls that the leaderboard accepts, else 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from turnwise import Chat, Episode, Message, Task, TrajectoryScore
from turnwise.errors import DataError
from turnwise_bfcl.checker import Call, check_calls
from turnwise_bfcl.multi_turn import CATEGORIES as MULTI_TURN


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
            DataError: its task is not of the leaderboard, or the agent has shown the model none of the functions, or
                the category needs tools that the run does not have.
        """
        task = episode.task
        about = check_task(self.chat, episode)
        if about["category"] in MULTI_TURN:
            raise DataError(f"{name_task(task)} needs the programs of its conversation; set tools: [bfcl]")
        calls = _first_calls(episode)
        good = [Call(name, arguments) for name, arguments in calls if arguments is not None]
        category = str(about["category"])
        if category.endswith("relevance"):
            right = bool(good) != category.endswith("irrelevance")
        else:
            right = len(good) == len(calls) and check_calls(about["functions"], good, task.ground_truth)
        return TrajectoryScore(value=float(right))


def name_task(task: Task) -> str:
    """Return the name of a task, for errors."""
    return f"task {task.uid!r} (row {task.sample_index})"


def check_task(chat: Chat | None, episode: Episode) -> Mapping[str, Any]:
    """Return the column `bfcl` of an episode's task; `DataError` as in `BfclReward.score`."""
    about: object = episode.task.extra.get("bfcl")
    where = name_task(episode.task)
    if not isinstance(about, Mapping) or not {"category", "functions"} <= about.keys():
        raise DataError(f"{where} is of no category of BFCL; set data.path to bfcl:CATEGORY")
    name = next(iter(about["functions"]), "")
    if chat is not None and name not in _prompt_text(chat, episode):
        raise DataError(f"{where}: its prompt does not show the function {name!r}; use agent: tool_agent")
    return about


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
