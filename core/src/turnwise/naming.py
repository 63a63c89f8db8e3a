"""Ids of calls: as the model sampled them, or new ones in the form of the chat template."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, TypeGuard

from turnwise.messages import name_call
from turnwise.protocols import CallIdChat, Chat
from turnwise.types import Message, ToolCall

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH: Final = 9
"""Some chat templates accept no other length."""


def name_calls(
    calls: Sequence[ToolCall], turn: int, chat: Chat | None = None, messages: Sequence[Message] = ()
) -> list[str]:
    """
    Return the ids of the calls of a turn: as the model sampled them, so that it finds the result of each.

    A call without one, or with one that the chat template refuses, gets an id that no other call of the conversation
    has, in the template's own form if it has one.

    Args:
        calls: of the turn, in order.
        turn: its number in the conversation.
        chat: the chat template; None takes any id.
        messages: of the conversation before the turn.
    """
    before = list(ids_of_calls(messages))
    ids = [sampled_id(call, chat) for call in calls]
    taken = {*before, *ids}
    for index, call in enumerate(calls):
        if ids[index] is None:
            names = candidate_ids(call.name, chat, turn=turn, index=index, number=len(before) + index)
            ids[index] = next(name for name in names if name not in taken)
            taken.add(ids[index])
    return [name for name in ids if name is not None]


def sampled_id(call: ToolCall, chat: Chat | None) -> str | None:
    """Return the id that the model wrote; None if it wrote none, or one that the chat template refuses."""
    if call.id is None or not _shows_ids(chat):
        return call.id
    return call.id if chat.takes_call_id(call.id, call.name) else None


def _shows_ids(chat: Chat | None) -> TypeGuard[CallIdChat]:
    # Not by isinstance: each turn asks, and a check against a protocol takes as long as to name ten calls.
    return hasattr(chat, "takes_call_id") and hasattr(chat, "write_call_id")


def candidate_ids(
    tool: str, chat: Chat | None, *, turn: int, index: int, number: int, place: str = ""
) -> Iterable[str]:
    """
    Yield ids for a call that has none, without end: in the template's own form, or of nine letters and digits.

    They are the same in every run.

    Args:
        tool: name of the called tool.
        chat: the chat template.
        turn: number of the turn in the conversation.
        index: of the call in its turn, from 0.
        number: of the call in the conversation, from 0.
        place: of the conversation among those of an episode; empty for the only one.
    """
    if _shows_ids(chat) and chat.write_call_id(tool, number):
        yield from (chat.write_call_id(tool, count) for count in itertools.count(number))
    first = name_call(turn, index)
    if not place and len(first) == _ID_LENGTH:
        yield first
    for attempt in itertools.count():
        digest = blake2b(f"{place}|{turn}|{index}|{attempt}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "big")
        yield "".join(_DIGITS[value // 36**digit % 36] for digit in range(_ID_LENGTH))


def ids_of_calls(messages: Iterable[Message]) -> Iterable[str]:
    """Yield the ids of the calls in a conversation."""
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                # Each turn reads the whole conversation, and a check against an abstract class is slow.
                if isinstance(call, (dict, Mapping)) and isinstance(name := call.get("id"), str):
                    yield name
