"""
Joins the calls of a turn that a client sends back in several messages, with results between them.

Such a client keeps each call beside its result. The model has sampled all calls before the first result, and each
result names its call, so the order in between says nothing: the calls are one message, and the results follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise import Message
from turnwise_gateway.tree.messages import JoinedTurn
from turnwise_gateway.tree.places import ConversationNode, ConversationTree


def join_turns(tree: ConversationTree[Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """
    Return a conversation in which each turn of the model is one message.

    A turn is joined only if all of its calls are there, each once and as the model made them: a changed turn stays as
    the client sent it, and so is another one. Results keep their order.
    """
    found: list[Message] = []
    index = 0
    while index < len(messages):
        end, joined = _join_turn(tree, messages, index)
        found += joined
        index = end
    return tuple(found)


def is_part(tree: ConversationTree[Any], message: Message) -> bool:
    """Return whether a message has some of the calls of a turn, but not all."""
    calls = message.get("tool_calls") or ()
    turn = tree.owner(calls[0]["id"]) if calls else None
    return turn is not None and len(calls) < len(turn.message["tool_calls"])


def _join_turn(tree: ConversationTree[Any], messages: Sequence[Message], start: int) -> tuple[int, Sequence[Message]]:
    """Return the end of the messages that have a turn, and the turn with the results in them."""
    first = messages[start : start + 1]
    if not is_part(tree, first[0]):
        return start + 1, first
    turn = tree.owner(first[0]["tool_calls"][0]["id"])
    assert turn is not None, "a part has a turn"
    parts, results, end = _find_parts(turn, messages, start)
    joined = _join(turn, parts)
    if joined is None or not turn.agrees(tree.normalise(joined)):
        return start + 1, first
    return end, (joined, *results)


def _find_parts(
    turn: ConversationNode[Any], messages: Sequence[Message], start: int
) -> tuple[list[Message], list[Message], int]:
    """Return the messages with calls of a turn, the results between them, and the end of the last such message."""
    ids = {call["id"] for call in turn.message["tool_calls"]}
    parts: list[Message] = []
    between: list[Message] = []
    results, end = 0, start
    for index in range(start, len(messages)):
        message = messages[index]
        calls = message.get("tool_calls") or ()
        if calls and ids.issuperset(call["id"] for call in calls):
            parts.append(message)
            results, end = len(between), index + 1
        elif message["role"] == "tool" and message.get("tool_call_id") in ids:
            between.append(message)
        else:
            break
    return parts, between[:results], end


def _join(turn: ConversationNode[Any], parts: Sequence[Message]) -> Message | None:
    """Return one message with the calls of all parts, in the order of the turn; None if they are not the turn's."""
    sent = [call for part in parts for call in part["tool_calls"]]
    by_id = {call["id"]: call for call in sent}
    ids = [call["id"] for call in turn.message["tool_calls"]]
    contents = [part.get("content") or "" for part in parts]
    if len(sent) != len(ids) or by_id.keys() != set(ids) or not all(isinstance(each, str) for each in contents):
        return None
    joined = JoinedTurn(role="assistant", content="".join(contents), tool_calls=[by_id[each] for each in ids])
    if reasoning := "".join(part.get("reasoning_content") or "" for part in parts):
        joined["reasoning_content"] = reasoning
    return joined
