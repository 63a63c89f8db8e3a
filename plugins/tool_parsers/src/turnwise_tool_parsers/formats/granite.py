"""
Granite 3.x, 4 and 20b-functioncalling: JSON after a tag.

    calls = ("<|tool_call|>" | "<tool_call>") "[" object {"," object} "]"                Granite 3.x
          | "<tool_call>" object "</tool_call>"                                          Granite 4
          | "<function_call>" object                                                     Granite 20b

    object = '{"name": NAME, "arguments": OBJECT}'

Source: IBM's chat templates. Those of Granite 3.1 to 3.3 say "respond with <|tool_call|> followed by a JSON list of
tools used"; that of Granite 4.0 writes each call between `<tool_call>` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from turnwise import ToolCall
from turnwise_tool_formats.call_frame import CallFrame, frame_list
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import find_arguments, follow_json_calls
from turnwise_tool_formats.turn import Found, FramedGrammar, Turn, TurnFollower, read_json_calls

_CLOSE = "</tool_call>"
_OPENINGS = ("<|tool_call|>", "<tool_call>", "<function_call>")


class Granite(FramedGrammar):
    """The format `granite`."""

    name = "granite"
    form = '<|tool_call|>[{"name": "<tool>", "arguments": {...}}].'
    opening = r"<\|tool_call\|>|<tool_call>|<function_call>"
    closing = (_CLOSE,)

    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        if _CLOSE in tags and "<|tool_call|>" not in tags:
            before = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
            return CallFrame(before, f"}}\n{_CLOSE}", "\n", openings=_OPENINGS)
        return frame_list("<|tool_call|>[", name, "]", _OPENINGS)

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        calls, stop = read_json_calls(turn, opening.end())
        return calls, max(turn.skip(_CLOSE, stop), stop)

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        stop = yield from follow_json_calls(follower, opening.end(), self.argument_keys)
        return (yield from follower.skip_tag((_CLOSE,), stop))[1]

    def find_arguments(self, call: ToolCall) -> str | None:
        return find_arguments(call.raw, self.argument_keys)
