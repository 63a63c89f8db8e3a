"""The reward `bfcl` of a run with the tools `bfcl`: the leaderboard's own checker scores conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from attrs import field, frozen

from turnwise import Episode, Message, Resources, Task, TrajectoryScore
from turnwise.errors import DataError, PluginError
from turnwise.types import JsonDict
from turnwise_bfcl.calls import is_plain_call, write_call
from turnwise_bfcl.multi_turn import CATEGORIES as MULTI_TURN
from turnwise_bfcl.multi_turn import REPLIES, entry_of
from turnwise_bfcl.reward import BfclReward, check_task, name_task
from turnwise_bfcl.simulator import ExhaustedError, shared_simulator
from turnwise_bfcl.tools import Conversation

MAX_STEPS: Final = 20
"""Turns with calls that the leaderboard allows to a model before it must answer the user."""
_GRADING_S: Final = 300.0


@frozen
class ConversationReward:
    """
    Scores conversations of multi-turn categories, and tasks of all others as `BfclReward`.

    Attributes:
        resources: of the run.
        tool: name of one of the tools `bfcl`.
    """

    resources: Resources = field(repr=False)
    tool: str

    def grading_s(self, _task: Task) -> float:
        """Return the seconds for a score, which needs milliseconds, or its turn after many others."""
        return _GRADING_S

    async def score(self, episode: Episode) -> TrajectoryScore:
        """
        Return 1 if programs and results are right after each of the user's turns, else 0.

        Raises:
            DataError: as `BfclReward.score`; or the run has another user, or the right calls of the task are none.
            InfrastructureError: the process that compares cannot run.
        """
        about = check_task(self.resources.chat, episode)
        if about["category"] not in MULTI_TURN:
            return await BfclReward(self.resources.chat).score(episode)
        answers = _right_calls(episode)
        turns = [*_split(episode.messages)]
        told = [turn[0].get("content") for turn in turns[1:]]
        if self.resources.interaction is None or told != episode.task.extra[REPLIES][: len(told)]:
            raise DataError(
                f"{name_task(episode.task)}: its user has not said its questions; set interaction: scripted_user"
            )
        conversation = await episode.open_tool(self.tool)
        if not isinstance(conversation, Conversation):
            raise PluginError(f"tool {self.tool!r} is wrapped, and its session has no calls: {conversation!r}")
        steps = _match(turns, conversation.calls)
        right = _is_whole(turns, steps, answers) and await _is_right(episode, steps, answers)
        return TrajectoryScore(value=float(right))


async def _is_right(episode: Episode, steps: list[list[list[str]]], answers: list[list[str]]) -> bool:
    request: JsonDict = {"entry": entry_of(episode.task), "turns": steps, "answers": answers}
    try:
        return bool((await shared_simulator().ask(request))["valid"])
    except ExhaustedError:
        return False


def _is_whole(turns: Sequence[Sequence[Message]], steps: Sequence[Sequence[object]], answers: Sequence[object]) -> bool:
    """Return whether the model has answered each question of the user, after no more steps than it may take."""
    last = turns[-1][-1]
    ended = last.get("role") == "assistant" and not last.get("tool_calls")
    return ended and len(turns) == len(answers) and all(len(each) <= MAX_STEPS for each in steps)


def _right_calls(episode: Episode) -> list[list[str]]:
    """Return the right calls of each turn. They are evaluated, so a file with tasks must not bring other code."""
    found, names = episode.task.ground_truth, episode.task.extra["bfcl"]["functions"]
    if not isinstance(found, Sequence) or not all(
        isinstance(call, str) and is_plain_call(call, names) for calls in found for call in calls
    ):
        raise DataError(f"{name_task(episode.task)}: its ground_truth is no list of calls for each turn")
    return [list(calls) for calls in found]


def _split(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages of each turn of the user, which begins with the user's message."""
    places = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    for start, end in pairwise([*places, len(messages)]):
        yield list(messages[start:end])


def _match(
    turns: Sequence[Sequence[Message]], ran: Sequence[tuple[str, Mapping[str, object]]]
) -> list[list[list[str]]]:
    """Return the calls that have run, by turn of the user and by step; the agent has refused the others."""
    left = [(name, _plain(arguments), write_call(name, arguments)) for name, arguments in ran]
    left.reverse()
    found: list[list[list[str]]] = []
    for turn in turns:
        found.append([])
        for message in turn:
            step = []
            for call in message.get("tool_calls") or ():
                function: Any = call["function"]
                if left and left[-1][:2] == (function["name"], _plain(function["arguments"])):
                    step.append(left.pop()[2])
            if step:
                found[-1].append(step)
    if left:
        raise PluginError(f"the messages of the episode lack {len(left)} of its calls, from {left[-1][2]!r:.200} on")
    return found


def _plain(arguments: object) -> str:
    """Return arguments as one text; the agent keeps an object or JSON, and of a malformed call any text."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (ValueError, RecursionError):
        return ""
