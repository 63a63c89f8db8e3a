"""Messages in the OpenAI form: a turn of the model as one, also while it is sampled, and the ids of long ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, TypeVar

from attrs import frozen

from turnwise.errors import ConfigError
from turnwise.threads import in_thread
from turnwise.types import Message, ToolCall, ToolResult

UNNAMED_CALL: Final = "malformed_call"
"""Name of a call whose name cannot be read: clients and templates refuse an empty one, and no tool has this one."""
record_metric: Final[ContextVar[Callable[[str, float], None]]] = ContextVar("record_metric")
"""Adds to a metric of the episode that the running task belongs to, for chats and tools, which know no episode."""
MAX_TOOL_NAME: Final = 64
"""Characters of a tool's name in error texts; a model may write megabytes there."""
LONG_CHARS: Final = 1 << 14
"""Characters from which `encode_beside_loop` uses a thread: templates and tokenizers take 5 to 10 ms for them."""
_Ids = TypeVar("_Ids")
"""Ids, perhaps with pictures."""
_ONE_AT_A_TIME: Final = threading.Lock()
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)  # `json.dumps` with an option makes a new one at every call


@frozen(kw_only=True)
class CallSoFar:
    """
    A call of a turn that is being sampled.

    Attributes:
        name: of the tool; empty when a whole turn has a malformed call without one.
        arguments: how the text of its arguments begins. That of a complete call is a JSON object, as the model wrote it
            where the format has JSON. A malformed call has no JSON object there, in most cases.
        is_complete: the call has ended and has no mistake.
        id: that the model wrote before the arguments; None if it wrote none there.
        late_id: that the model wrote behind the arguments; known when the turn is whole.
    """

    name: str
    arguments: str = ""
    is_complete: bool = False
    id: str | None = None
    late_id: str | None = None


@frozen(kw_only=True)
class TurnSoFar:
    """
    The decided part of a turn that is being sampled.

    Attributes:
        texts: before the first call, between the calls and behind the last one: one more than there are calls. Only the
            last text may grow.
        calls: in order.
    """

    texts: tuple[str, ...]
    calls: tuple[CallSoFar, ...] = ()


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


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """Return the text for a model that called a tool which it does not have."""
    return f"Error: there is no tool {name[:MAX_TOOL_NAME]!r}; the tools are: {', '.join(known) or 'none'}"


def text_of_result(result: ToolResult, agent: str) -> str:
    """Return the text of a result for an agent that shows texts alone; `ConfigError` if it has pictures."""
    if result.pictures:
        raise ConfigError(f"a tool returned {len(result.pictures)} pictures, and agent {agent!r} shows the model none")
    return result.text


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


async def encode_beside_loop(messages: Sequence[Message], encode: Callable[[], _Ids]) -> _Ids:
    """
    Return the ids of messages from a function that renders and encodes them.

    It runs in a thread where the messages are long, so that the other episodes of the process continue: 110,000 tokens
    take 0.2 to 1.1 seconds. The process has one such thread at a time, because each thread that waits for
    the interpreter makes the event loop wait longer.
    """
    if sum(_count_chars(message.get("content")) for message in messages) < LONG_CHARS:
        return encode()
    return await in_thread(_encode_alone, {"encode": encode})


def _encode_alone(encode: Callable[[], _Ids]) -> _Ids:
    with _ONE_AT_A_TIME:
        return encode()


def _count_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, Sequence) else ()
    # To read a picture takes as long as a long text, and its URL is one.
    return sum(
        _count_chars(part.get("text")) or (LONG_CHARS if "image_url" in part else 0)
        for part in parts
        if isinstance(part, Mapping)
    )
