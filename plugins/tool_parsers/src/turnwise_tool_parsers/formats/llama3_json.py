"""
Llama 3.1 and later: JSON objects at the start of the turn, or after `<|python_tag|>`.

    turn   = object {[";"] object} | text "<|python_tag|>" object {[";"] object}
    object = '{"name": NAME, "parameters": OBJECT}'

Source: Meta's chat template of Llama-3.1-8B-Instruct, which says "respond with a JSON for a function call [...]
in the format {"name": function name, "parameters": dictionary of argument name and its value}", and the model card.
The template allows one call in a turn; vLLM and SGLang read several with ";" between them. JSON that is neither at
the start of the turn nor after the tag is text. Without the tag, an object without "parameters" is an answer in JSON.
"""

from __future__ import annotations

import re

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_parsers.turn import Found, Grammar, Turn

_TAG = "<|python_tag|>"


class Llama3Json(Grammar):
    """The format `llama3_json`."""

    name = "llama3_json"
    form = '{"name": "<tool>", "parameters": {...}} and nothing else.'
    opening = re.escape(_TAG)
    bare = re.compile(r'\{\s{0,8}"(?:name|type"\s{0,8}:\s{0,8}"function)"')

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        tagged = opening.group() == _TAG
        at = opening.end() if tagged else opening.start()
        if not tagged and not _is_call(turn, at):
            return None
        calls: list[ToolCall] = []
        while True:
            try:
                call, stop = turn.read_call(at)
            except MalformedError as error:
                found, stop = turn.refuse_to_next_tag(str(error), at, at)
                return [*calls, *found], stop
            calls.append(call)
            at = max(turn.skip(";", stop), stop)
            if turn.skip("{", at) < 0:
                return calls, stop


def _is_call(turn: Turn, start: int) -> bool:
    """Return whether JSON without a tag is meant as a call; malformed JSON with a name is."""
    try:
        value, _stop = turn.read_value(read_json, start)
    except MalformedError:
        return True
    return any(key in value for key in turn.grammar.argument_keys)
