"""
Hermes, Qwen2.5 and Qwen3: a JSON object between tags.

    call   = "<tool_call>" object "</tool_call>"
    object = '{"name": NAME, "arguments": OBJECT}'

Source: the chat templates of Hermes-2-Pro and Qwen2.5. Only `auto` uses this grammar: the package
turnwise-hermes-parser registers the name, and has more options.
"""

from __future__ import annotations

import re

from turnwise_tool_parsers.json_values import MalformedError
from turnwise_tool_parsers.turn import Found, Grammar, Turn

_CLOSE = "</tool_call>"


class Hermes(Grammar):
    """The format `hermes`."""

    name = "hermes"
    form = '<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>.'
    opening = "<tool_call>"
    closing = (_CLOSE,)
    must_close = True

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = search_from = opening.end()
        try:
            call, search_from = turn.read_call(start)
            stop = turn.skip(_CLOSE, search_from)
            if stop < 0:
                raise MalformedError("there is text after its JSON")  # noqa: TRY301 - the next tag ends the call
        except MalformedError as error:
            return turn.refuse_to_next_tag(str(error), start, search_from)
        return [call], stop
