"""Reads the calls in a text that a client has sent back, with the tool parser of the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol, cast

import numpy as np

from turnwise import Chat, ToolCall, ToolParser
from turnwise.messages import format_arguments
from turnwise.task_tools import parse_turn
from turnwise.types import ToolSchema
from turnwise_gateway.tree.messages import NamedCalls, ReadCalls

_MAX_PARSED_CHARS: Final = 1 << 20
_MAX_ENCODED_CHARS: Final = 1 << 15
"""Longest texts that are compared by their calls, so that the loop of events is not held up."""


class ContentParser(Protocol):
    """A tool parser that reads the text of a turn without its reasoning, as clients send it back."""

    def parse_content(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, Sequence[ToolCall]]:
        """Return the text and the calls, with the types of these tools."""


def find_call_reader(parser: ToolParser | None, chat: Chat) -> ReadCalls | None:
    """Return the reader of calls in texts; None in a run without a parser."""
    return None if parser is None else partial(_read_calls, parser, chat)


def _read_calls(parser: ToolParser, chat: Chat, text: str, tools: Sequence[ToolSchema]) -> tuple[str, NamedCalls]:
    """
    Return the text outside the calls, and the name and arguments of each, of a turn as a client has written it.

    A text that is too long, or has a malformed call, has no calls.
    """
    parse = getattr(type(parser), "parse_content", None)  # a method of the class, as in `parse_turn`
    if len(text) > (_MAX_ENCODED_CHARS if parse is None else _MAX_PARSED_CHARS):
        return text, ()
    if parse is None:
        outside, calls = parse_turn(parser, np.array(chat.tokenizer.encode(text), np.int32), tools)
    else:
        outside, calls = cast(ContentParser, parser).parse_content(text, tools)
    if not calls or any(call.error for call in calls):
        return text, ()
    return outside, tuple((call.name, format_arguments(call)) for call in calls)
