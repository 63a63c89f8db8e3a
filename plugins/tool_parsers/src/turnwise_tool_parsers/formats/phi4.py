"""
Phi-4-mini: JSON objects in square brackets.

    calls  = "<|tool_call|>" list ["<|/tool_call|>"] | "functools" list
    list   = "[" object {"," object} "]"
    object = '{"name": NAME, "arguments": OBJECT}'

Source: the tokens and the model card of Phi-4-mini-instruct for the first form, and its technical report and vLLM's
`tool_chat_template_phi4_mini.jinja` for the second ("prefix function calls with functools marker").
"""

from __future__ import annotations

import re
from collections.abc import Collection

from turnwise import ToolCall
from turnwise_tool_formats.call_frame import CallFrame, frame_list
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import find_arguments, follow_json_calls
from turnwise_tool_formats.turn import Found, FramedGrammar, Turn, TurnFollower, read_json_calls

_CLOSE = "<|/tool_call|>"


class Phi4(FramedGrammar):
    """The format `phi4`."""

    name = "phi4"
    form = '<|tool_call|>[{"name": "<tool>", "arguments": {...}}]<|/tool_call|>.'
    opening = r'<\|tool_call\|>|\bfunctools(?=\[|\s{1,8}\[\s{0,8}[{\]]|\s{0,8}\{\s{0,8}")'
    closing = (_CLOSE,)

    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        return frame_list("<|tool_call|>[", name, f"]{_CLOSE}", ("<|tool_call|>", "functools"))

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        calls, stop = read_json_calls(turn, opening.end())
        return calls, max(turn.skip(_CLOSE, stop), stop)

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        stop = yield from follow_json_calls(follower, opening.end(), self.argument_keys)
        return (yield from follower.skip_tag((_CLOSE,), stop))[1]

    def find_arguments(self, call: ToolCall) -> str | None:
        return find_arguments(call.raw, self.argument_keys)
