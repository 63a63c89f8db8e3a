"""
Kimi K2 and K2.5: a section of calls, each with an id that holds the name.

    section = "<|tool_calls_section_begin|>" call {call} "<|tool_calls_section_end|>"
    call    = "<|tool_call_begin|>" ID "<|tool_call_argument_begin|>" OBJECT "<|tool_call_end|>"
    ID      = ["functions."] NAME [":" INDEX]

Source: `docs/tool_call_guidance.md` of Kimi-K2-Instruct.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.call_frame import CallFrame
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.json_stream import follow_arguments
from turnwise_tool_formats.turn import Turn, TurnFollower, with_id
from turnwise_tool_parsers.formats.sections import SectionGrammar

_HEAD = re.compile(r"\s*+([^\s<]{0,256}+)\s*+<\|tool_call_argument_begin\|>")
_INDEX = re.compile(r":\d{1,16}$")
_ID = re.compile(r"\s*+(functions\.[\w.\-]{1,256}+:\d{1,16})(?!\d)")


class KimiK2(SectionGrammar):
    """The format `kimi_k2`."""

    name = "kimi_k2"
    form = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.<tool>:<index><|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>."
    )
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    opening = f"{re.escape(section[0])}|{re.escape(call[0])}"
    closing = (call[1], section[1])

    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        start = f"{self.call[0]}functions.{name}:"
        before, openings = f"{start}<|tool_call_argument_begin|>", (self.section[0], self.call[0])
        return CallFrame(before, self.call[1], "", *self.section, openings=openings, number_at=len(start))

    def follow_head_and_arguments(self, follower: TurnFollower, start: int) -> Waiting[tuple[FollowedCall, int]]:
        head = yield from follower.match(_HEAD, start)
        name = _name_in(head[1])
        if name.isdigit():
            raise MalformedError(f"{name!r} is an index and no name")
        call = follower.begin(name, head.end(), with_id(ToolCall(), head[1]).id)
        return call, (yield from follow_arguments(follower, call, head.end()))

    def read_head_and_arguments(self, turn: Turn, start: int) -> tuple[ToolCall, int]:
        head = _HEAD.match(turn.text, start)
        if head is None:
            raise MalformedError("<|tool_call_argument_begin|> is missing")
        name = _name_in(head[1])
        if name.isdigit():
            raise MalformedError(f"{name!r} is an index and no name")
        arguments, stop = turn.read_value(read_json, head.end())
        return with_id(turn.build(name, arguments, turn.text[start:stop]), head[1]), stop

    def read_name_and_id(self, turn: Turn, start: int) -> tuple[str, str | None]:
        found = _HEAD.match(turn.text, start) or _ID.match(turn.text, start)
        name = _name_in(found[1]) if found else ""
        return "" if name.isdigit() else name, found[1] if found else None


def _name_in(call_id: str) -> str:
    return _INDEX.sub("", call_id.removeprefix("functions."))
