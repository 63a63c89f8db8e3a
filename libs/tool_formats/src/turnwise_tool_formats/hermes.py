"""
Hermes, Qwen2.5 and Qwen3: a JSON object between tags.

    call   = "<tool_call>" object "</tool_call>"
    object = '{"name": NAME, "arguments": OBJECT}'

Source: the chat templates of Hermes-2-Pro and Qwen2.5.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise import ToolCall
from turnwise.types import JsonObject
from turnwise_strict_json import MalformedError
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import find_arguments, follow_json_call
from turnwise_tool_formats.turn import Found, Turn, TurnFollower, WrittenGrammar, dump_json, join_lines


class Hermes(WrittenGrammar):
    """
    The format `hermes`.

    Args:
        open_tag: before a call.
        close_tag: after a call.
    """

    name = "hermes"
    form = '{"name": "<tool>", "arguments": {...}} between the tags of a tool call.'
    must_close = True
    argument_keys = ("arguments",)

    def __init__(self, open_tag: str = "<tool_call>", close_tag: str = "</tool_call>") -> None:
        self.opening = re.escape(open_tag)
        self.closing = (close_tag,)
        self.instructions = (
            "For each function call, return a json object with function name and arguments within "
            f"{open_tag}{close_tag} XML tags:"
        )
        self._open_tag = open_tag

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = search_from = opening.end()
        try:
            call, search_from = turn.read_call(start)
            stop = turn.skip(self.closing[0], search_from)
            if stop < 0:
                raise MalformedError("there is text after its JSON")  # noqa: TRY301 - the next tag ends the call
        except MalformedError as error:
            return turn.refuse_to_next_tag(str(error), start, search_from)
        return [call], stop

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        call, stop = yield from follow_json_call(follower, opening.end(), self.argument_keys)
        stop = yield from follower.require_tag(self.closing[0], stop)
        call.complete()
        return stop

    def find_arguments(self, call: ToolCall) -> str | None:
        return find_arguments(call.raw, self.argument_keys)

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        written = [dump_json({"name": name, "arguments": arguments}) for name, arguments in calls]
        return join_lines(content, (f"{self._open_tag}\n{each}\n{self.closing[0]}" for each in written))
