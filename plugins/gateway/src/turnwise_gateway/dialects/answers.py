"""
Finds the calls that tool messages without an id answer.

Some clients, such as Qwen-Agent, send no id with a result. Its place tells the call only if the results after a turn
answer exactly its calls, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise import Message
from turnwise_gateway.dialects.fields import refuse


def unanswered_calls(messages: Sequence[Message]) -> list[str]:
    """Return the ids of the last turn's calls that no tool message behind it answers; none behind another message."""
    answered = set()
    for message in reversed(messages):
        if message["role"] != "tool":
            return [call["id"] for call in message.get("tool_calls") or () if call["id"] not in answered]
        answered.add(message["tool_call_id"])
    return []


def find_answered_call(messages: Sequence[Message], param: str) -> str:
    """Return the id of the call that the next tool message answers; `CallRefusedError` names `param`."""
    waiting = unanswered_calls(messages)
    if not waiting:
        raise refuse(param, "is missing, and no call of the turn before is without a result")
    return waiting[0]


def check_answers(messages: Sequence[Message], param: str) -> None:
    """Refuse a conversation whose last tool messages leave out a call, so that their places may mean other calls."""
    if messages and messages[-1]["role"] == "tool" and unanswered_calls(messages):
        text = "follows results without `tool_call_id` that are fewer than the calls, so each result needs the id"
        raise refuse(param, text)
