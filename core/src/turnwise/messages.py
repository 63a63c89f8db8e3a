"""A turn of the model as a message in the OpenAI form: content, and tool calls with ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from turnwise.types import Message, ToolCall

UNNAMED_CALL: Final = "malformed_call"
"""Name of a call whose name cannot be read: clients and templates refuse an empty one, and no tool has this one."""
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)  # `json.dumps` with an option makes a new one at every call


def name_call(turn: int, index: int) -> str:
    """
    Return the id of the call with a number, from 0, in a turn of the episode.

    It is the same in every run. It has nine letters and digits up to turn 999, because some chat templates accept no
    other form.
    """
    return f"call{turn:03d}{index:02d}"


def format_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as text; for a malformed call this is the sampled text."""
    return call.raw if call.error else _ENCODER.encode(dict(call.arguments))


def build_turn_message(
    content: str,
    calls: Sequence[ToolCall] = (),
    ids: Sequence[str] = (),
    split: Callable[[str], tuple[str, str]] | None = None,
) -> Message:
    """
    Return a turn as a message.

    Args:
        content: text outside the calls.
        calls: of the turn; a turn without any has no `tool_calls`.
        ids: of the calls.
        split: returns the reasoning in the content, and the rest; None leaves it there.
    """
    reasoning, content = ("", content) if split is None else split(content)
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": format_arguments(call)}}
            for call, name in zip(calls, ids, strict=True)
        ]
    return message
