r"""
DeepSeek V3, R1 and V3.1: a section of calls, each with a name and JSON arguments.

    section = "<｜tool▁calls▁begin｜>" call {call} "<｜tool▁calls▁end｜>"
    call    = "<｜tool▁call▁begin｜>" body "<｜tool▁call▁end｜>"
    body    = "function" "<｜tool▁sep｜>" NAME "\n```json\n" OBJECT "\n```"
            | NAME "<｜tool▁sep｜>" OBJECT                                                V3.1

Source: the chat templates of DeepSeek-V3-0324 and DeepSeek-V3.1. The bars are U+FF5C and the gaps U+2581.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.call_frame import CallFrame
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.json_stream import follow_arguments
from turnwise_tool_formats.turn import Turn, TurnFollower
from turnwise_tool_parsers.formats.sections import SectionGrammar

_HEAD = re.compile(r"\s*+([^\n<]{0,256})<｜tool▁sep｜>")
_FENCE = re.compile(r"\s*+([^\n`{]{1,256}+)\n\s*+```(?:json)?\s*+")
_FENCE_AND_BRACKET = re.compile(_FENCE.pattern + r"(?=\{)")


class DeepSeekV3(SectionGrammar):
    """The format `deepseek_v3`."""

    name = "deepseek_v3"
    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜><tool>\n```json\n{...}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>."
    )
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    opening = f"{section[0]}|{call[0]}"
    closing = (call[1], section[1])

    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        before = f"{self.call[0]}function<｜tool▁sep｜>{name}\n```json\n"
        return CallFrame(before, f"\n```{self.call[1]}", "\n", *self.section, openings=(self.section[0], self.call[0]))

    def follow_head_and_arguments(self, follower: TurnFollower, start: int) -> Waiting[tuple[FollowedCall, int]]:
        head = yield from follower.match(_HEAD, start)
        direct = yield from follower.skip_space(head.end())
        fence = None if follower.text[direct] == "{" else (yield from follower.match(_FENCE_AND_BRACKET, head.end()))
        at = fence.end() if fence else head.end()
        call = follower.begin((fence or head)[1], at)
        stop = yield from follow_arguments(follower, call, at)
        return call, (yield from follower.require_tag("```", stop)) if fence else stop

    def read_head_and_arguments(self, turn: Turn, start: int) -> tuple[ToolCall, int]:
        head = _HEAD.match(turn.text, start)
        if head is None:
            raise MalformedError("<｜tool▁sep｜> is missing")
        fence = _FENCE.match(turn.text, head.end())
        arguments, stop = turn.read_value(read_json, fence.end() if fence else head.end())
        name = fence[1] if fence else head[1]
        after = turn.skip("```", stop) if fence else stop
        if after < 0:
            return turn.refuse("``` after the arguments is missing", turn.text[start:stop], name.strip()), stop
        return turn.build(name, arguments, turn.text[start:after]), after
