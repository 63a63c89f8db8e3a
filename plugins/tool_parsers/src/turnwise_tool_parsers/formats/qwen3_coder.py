"""
Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: XML with one element for each argument.

    call      = ["<tool_call>"] "<function=" NAME ">" {parameter} "</function>" ["</tool_call>"]
    parameter = "<parameter=" KEY ">" TEXT "</parameter>"

Source: the chat template of Qwen3-Coder-30B-A3B-Instruct, which puts a line break after the opening and before the
closing tag of a parameter; both are dropped, and all other white space is kept. White space is allowed between
elements. The model sometimes omits `<tool_call>`, so the tag is optional, as in vLLM and SGLang. Nothing is escaped:
`</parameter>` ends a text only before `<parameter=` or `</function>`, so a text can hold it elsewhere, and
`</function>` too. A text that holds `<parameter=`, `<function=` or `<tool_call>` cannot be written, since the
parameter's closing tag may be missing. The tool's schema decides which texts are values of other types
(`turnwise_tool_formats.schema_values`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.types import JsonObject
from turnwise_strict_json import MalformedError
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.tag_stream import TaggedArguments
from turnwise_tool_formats.turn import Found, Turn, TurnFollower, WrittenGrammar, dump_json, first_call, join_lines

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_CLOSE, _PARAMETER_CLOSE = "</function>", "</parameter>"
_FUNCTION = re.compile(r"\s*+<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]{1,256})>")
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))|<parameter=|<function=|<tool_call>")
_ARGUMENTS = TaggedArguments(_PARAMETER, _END_OF_VALUE, _PARAMETER_CLOSE, _FUNCTION_CLOSE, trims=True)


class Qwen3Coder(WrittenGrammar):
    """The format `qwen3_coder`."""

    name = "qwen3_coder"
    form = (
        "<tool_call>\n<function=<tool>>\n<parameter=<argument>>\n<value>\n</parameter>\n</function>\n</tool_call>, "
        "with a parameter element for each argument."
    )
    opening = "<tool_call>|<function="
    closing = (_CALL_CLOSE,)
    instructions = (
        "If you choose to call a function, reply in the following format, with one <parameter=...> element for each "
        "argument:"
    )

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        return join_lines(content, (self._write_call(name, arguments) for name, arguments in calls))

    def _write_call(self, name: str, arguments: JsonObject) -> str:
        elements = [
            f"<parameter={key}>\n{value if isinstance(value, str) else dump_json(value)}\n{_PARAMETER_CLOSE}\n"
            for key, value in arguments.items()
        ]
        return f"{_CALL_OPEN}\n<function={name}>\n{''.join(elements)}{_FUNCTION_CLOSE}\n{_CALL_CLOSE}"

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        tagged = opening.group() == _CALL_OPEN
        start = opening.end() if tagged else opening.start()
        function = _FUNCTION.match(turn.text, start)
        if function is None:
            # After the tag, the next opening may be the broken one of this call.
            return turn.refuse_to_next_tag("<function=<tool>> is missing", start, max(start, opening.end()))
        name = function[1].strip()
        try:
            arguments, stop = self._read_parameters(turn, name, function.end())
        except MalformedError as error:
            return turn.refuse_to_next_tag(str(error), start, function.end(), name)
        call = turn.build(name, arguments, turn.text[start:stop])
        return [call], max(turn.skip(_CALL_CLOSE, stop), stop)

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        function = yield from follower.match(
            _FUNCTION, opening.end() if opening.group() == _CALL_OPEN else opening.start()
        )
        call = follower.begin(function[1], function.end())
        stop = yield from _ARGUMENTS.follow(follower, call, function.end())
        follower.check(lambda turn: first_call(self.read(turn, opening)))
        call.complete()
        return (yield from follower.skip_tag((_CALL_CLOSE,), stop))[1]

    def _read_parameters(self, turn: Turn, name: str, start: int) -> tuple[dict[str, Any], int]:
        arguments: dict[str, object] = {}
        at = start
        while parameter := _PARAMETER.match(turn.text, at):
            key = parameter[1].strip()
            if key in arguments:
                raise MalformedError(f"the parameter {key!r} is given twice")
            end = turn.search(_END_OF_VALUE, parameter.end())
            if end is None or end.group() != _PARAMETER_CLOSE:
                why = f"the parameter {key!r} has no {_PARAMETER_CLOSE} before <parameter= or {_FUNCTION_CLOSE}"
                raise MalformedError(why)
            text = turn.text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = turn.types.convert(name, key, text, turn.max_depth)
            at = end.end()
        stop = turn.skip(_FUNCTION_CLOSE, at)
        if stop < 0:
            raise MalformedError(f"{_FUNCTION_CLOSE} is missing")
        return arguments, stop
