"""
Episodes as lines of OpenAI's fine-tuning files.

Source: https://platform.openai.com/docs/guides/supervised-fine-tuning, section on the format of chats; `weight` 0
leaves a message out of the loss. Pictures are in messages of users alone:
https://platform.openai.com/docs/guides/vision-fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise import EpisodeResult, Status
from turnwise.errors import DataError
from turnwise.media import Picture, picture_part
from turnwise.task_tools import read_task_tools
from turnwise.types import JsonDict, Message, ToolSchema
from turnwise_result_files.messages import calls_of, contents_of, is_malformed, text_of


def to_chat(result: EpisodeResult, tools: Sequence[ToolSchema] = ()) -> JsonDict | None:
    """
    Return an episode as a line of a fine-tuning file, or None when it failed or has no turn that could be trained.

    Turns of the task itself, and turns with a malformed call, have the weight 0. So has the turn with which an episode
    ends that is not completed: a limit may have cut it off, and a trainer would add the end that the model never wrote.
    `reasoning_content` is written as the chat templates of open models read it; OpenAI's format has no such key.

    Args:
        result: the episode.
        tools: schemas of the run's tools, for a task without its own; see `turnwise.task_tools`.

    Raises:
        DataError: a message of another role than `user` has a picture.
    """
    if not result.trainable:
        return None
    num_given = len(result.task.messages)
    num_whole = len(result.messages) - (result.status is not Status.COMPLETED)
    contents = [
        _content(message, parts, result.uid)
        for message, parts in zip(result.messages, contents_of(result), strict=True)
    ]
    messages = [
        _message(message, content, is_learned=num_given <= index < num_whole)
        for index, (message, content) in enumerate(zip(result.messages, contents, strict=True))
    ]
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


def _content(message: Message, parts: Sequence[str | Picture], uid: str) -> str | list[dict[str, Any]]:
    if not any(isinstance(part, Picture) for part in parts):
        return text_of(message)
    if message["role"] != "user":
        where = f"a message of the role {message['role']} of episode {uid}"
        raise DataError(f"{where} has a picture, and this form of a chat has a place for them in those of users alone")
    return [picture_part(part) if isinstance(part, Picture) else {"type": "text", "text": part} for part in parts]


def _message(message: Message, content: str | list[dict[str, Any]], *, is_learned: bool) -> dict[str, Any]:
    role = str(message["role"])
    line: dict[str, object] = {"role": role, "content": content}
    if role == "tool":
        line["tool_call_id"] = str(message.get("tool_call_id", ""))
    if role != "assistant":
        return line
    if reasoning := message.get("reasoning_content"):
        line["reasoning_content"] = str(reasoning)
    if calls := list(calls_of(message)):
        line["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            for name, function, arguments in calls
        ]
    if not is_learned or is_malformed(message):
        line["weight"] = 0
    return line
