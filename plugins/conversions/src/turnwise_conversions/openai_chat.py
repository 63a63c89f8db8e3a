"""
Episodes as lines of OpenAI's fine-tuning files.

Source: https://platform.openai.com/docs/guides/supervised-fine-tuning, section on the format of chats; `weight` 0
leaves a message out of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise import EpisodeResult
from turnwise.task_tools import read_task_tools
from turnwise.types import JsonDict, Message, ToolSchema
from turnwise_result_files.messages import calls_of, is_malformed, refuse_pictures, text_of


def to_chat(result: EpisodeResult, tools: Sequence[ToolSchema] = ()) -> JsonDict | None:
    """
    Return an episode as a line of a fine-tuning file, or None when it has no turn that could be trained.

    Turns of the task itself, and turns with a malformed call, have the weight 0.

    Args:
        result: the episode.
        tools: schemas of the run's tools, for a task without its own; see `turnwise.task_tools`.
    """
    refuse_pictures(result, "this form of a chat")
    num_given = len(result.task.messages)
    messages = [_message(message, index < num_given) for index, message in enumerate(result.messages)]
    # A file may not end with messages that no turn answers.
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        return None
    line: JsonDict = {"messages": messages}
    own = read_task_tools(result.task)
    if own is not None:
        line["tools"] = list(own)
    elif tools:
        line["tools"] = list(tools)
    return line


def _message(message: Message, is_given: bool) -> dict[str, Any]:
    role = str(message["role"])
    line: dict[str, Any] = {"role": role, "content": text_of(message)}
    if role == "tool":
        line["tool_call_id"] = str(message.get("tool_call_id", ""))
    if role != "assistant":
        return line
    if calls := list(calls_of(message)):
        line["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            for name, function, arguments in calls
        ]
    if is_given or is_malformed(message):
        line["weight"] = 0
    return line
