"""
Llama 3.1 and later: JSON objects at the start of the turn, or after `<|python_tag|>`.

    turn   = calls | text "<|python_tag|>" calls
    calls  = part {[";" | ","] part}
    part   = object | "[" object {"," object} "]"
    object = '{"name": NAME, "parameters": OBJECT}', with its keys in any order

Source: Meta's chat template of Llama-3.1-8B-Instruct, which says "respond with a JSON for a function call [...]
in the format {"name": function name, "parameters": dictionary of argument name and its value}", and the model card.
The template allows one call in a turn; vLLM and SGLang read several with ";" between them, and models write commas
and lists, too. JSON that is neither at the start of the turn nor after the tag is text. Without the tag, an object
without a name or without "parameters" is an answer in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise import ToolCall
from turnwise.types import JsonObject
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import find_arguments, follow_json_calls
from turnwise_tool_formats.turn import Found, Turn, TurnFollower, WrittenGrammar, dump_json, read_json_calls

_TAG = "<|python_tag|>"
_NAME = re.compile(r'"name"\s*+:')


class Llama3Json(WrittenGrammar):
    """The format `llama3_json`."""

    name = "llama3_json"
    form = '{"name": "<tool>", "parameters": {...}} and nothing else.'
    opening = re.escape(_TAG)
    bare = re.compile(r'(?:\[\s*)?\{\s*"(?:name|parameters|arguments|type"\s*:\s*"function)"')

    instructions = (
        "To call a function, respond with a JSON object of its name and its parameters, and nothing else; write ; "
        "between several. For example:"
    )

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        written = "; ".join(dump_json({"name": name, "parameters": arguments}) for name, arguments in calls)
        return f"{content}{_TAG}{written}" if content else written

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        if opening.group() == _TAG:
            return read_json_calls(turn, opening.end())
        return read_json_calls(turn, opening.start()) if _is_call(turn, opening) else None

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        if opening.group() == _TAG:
            return (yield from follow_json_calls(follower, opening.end(), self.argument_keys))
        # Without its arguments, an object may be an answer in JSON.
        keys = self.argument_keys
        return (yield from follow_json_calls(follower, opening.start(), keys, needs_arguments=True))

    def find_arguments(self, call: ToolCall) -> str | None:
        return find_arguments(call.raw, self.argument_keys)


def _is_call(turn: Turn, opening: re.Match[str]) -> bool:
    """Return whether JSON without a tag is meant as a call; malformed JSON with a name is."""
    try:
        value, _stop = turn.read_value(read_json, opening.start())
    except MalformedError:
        starts_with_arguments = opening.group().endswith(('parameters"', 'arguments"'))
        return not starts_with_arguments or turn.search(_NAME, opening.end()) is not None
    return any(_looks_like_call(each, turn) for each in (value if isinstance(value, list) else [value]))


def _looks_like_call(value: object, turn: Turn) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict) and value.get("type") == "function":  # as in the OpenAI format
        return True
    names = {"name", "function"} & value.keys() or value.get("type") == "function"
    return bool(names) and any(key in value for key in turn.grammar.argument_keys)
