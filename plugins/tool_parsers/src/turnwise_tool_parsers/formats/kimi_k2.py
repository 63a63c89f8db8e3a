"""
Kimi K2 and K2.5: a section of calls, each with an id that holds the name.

    section = "<|tool_calls_section_begin|>" call {call} "<|tool_calls_section_end|>"
    call    = "<|tool_call_begin|>" ["functions."] NAME [":" INDEX] "<|tool_call_argument_begin|>" OBJECT
              "<|tool_call_end|>"

Source: `docs/tool_call_guidance.md` of Kimi-K2-Instruct.
"""

from __future__ import annotations

import re

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_parsers.formats.sections import SectionGrammar
from turnwise_tool_parsers.turn import Turn

_HEAD = re.compile(r"\s*+([^\s<]{0,256}+)\s*+<\|tool_call_argument_begin\|>")
_INDEX = re.compile(r":\d{1,16}$")


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

    def read_head_and_arguments(self, turn: Turn, start: int) -> tuple[ToolCall, int]:
        head = _HEAD.match(turn.text, start)
        if head is None:
            raise MalformedError("<|tool_call_argument_begin|> is missing")
        name = _INDEX.sub("", head[1].removeprefix("functions."))
        if name.isdigit():
            raise MalformedError(f"{name!r} is an index and no name")
        arguments, stop = turn.read_value(read_json, head.end())
        return turn.build(name, arguments, turn.text[start:stop]), stop
