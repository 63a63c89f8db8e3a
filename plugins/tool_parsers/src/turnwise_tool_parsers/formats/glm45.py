"""
GLM-4.5, 4.6 and 4.7: XML with a key element and a value element for each argument.

    call = "<tool_call>" NAME {"<arg_key>" KEY "</arg_key>" "<arg_value>" TEXT "</arg_value>"} "</tool_call>"

Source: the chat template of GLM-4.5, which writes line breaks between elements; that of GLM-4.7 writes none. White
space between elements is ignored, and that inside a value is kept. Nothing is escaped: `</arg_value>` ends a value only
before `<arg_key>` or `</tool_call>`, so a text can hold it elsewhere, and `</tool_call>` too. A text that holds
`<arg_key>` or `<tool_call>` cannot be written, since the value's closing tag may be missing. The tool's schema decides
which texts are values of other types (`turnwise_tool_formats.schema_values`): the template writes texts as they are,
and other values as JSON.
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

_CLOSE, _VALUE_CLOSE = "</tool_call>", "</arg_value>"
_MAX_HEAD = 512
_NAME = re.compile(r"\s*+([^<>\n]{1,256})")
_KEY = re.compile(r"\s*+<arg_key>([^<>]{1,256})</arg_key>\s*+<arg_value>")
_END_OF_VALUE = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))|<arg_key>|<tool_call>")
_ARGUMENTS = TaggedArguments(_KEY, _END_OF_VALUE, _VALUE_CLOSE, _CLOSE)


class Glm45(WrittenGrammar):
    """The format `glm45`."""

    name = "glm45"
    form = (
        "<tool_call><tool>\n<arg_key><argument></arg_key>\n<arg_value><value></arg_value>\n</tool_call>, "
        "with a pair of elements for each argument."
    )
    opening = "<tool_call>"
    closing = (_CLOSE,)
    must_close = True
    instructions = (
        "For each function call, output the function name and arguments within the following XML format, with one pair "
        "of <arg_key> and <arg_value> for each argument:"
    )

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        return join_lines(content, (self._write_call(name, arguments) for name, arguments in calls))

    def _write_call(self, name: str, arguments: JsonObject) -> str:
        texts = {key: value if isinstance(value, str) else dump_json(value) for key, value in arguments.items()}
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}{_VALUE_CLOSE}\n" for key, text in texts.items()]
        return f"<tool_call>{name}\n{''.join(pairs)}{_CLOSE}"

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = opening.end()
        head = _NAME.match(turn.text, start)
        if head is None:
            return turn.refuse_to_next_tag("the name is missing", start, start)
        name = head[1].strip()
        try:
            arguments, at = self._read_arguments(turn, name, head.end())
        except MalformedError as error:
            return turn.refuse_to_next_tag(str(error), start, head.end(), name)
        stop = turn.skip(_CLOSE, at)
        if stop < 0:
            return turn.refuse_to_next_tag("expected <arg_key> or </tool_call>", start, at, name)
        return [turn.build(name, arguments, turn.text[start : stop - len(_CLOSE)])], stop

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        while (head := _NAME.match(follower.text, opening.end())) is None or head.end() == len(follower.text):
            if len(follower.text) > opening.end() + _MAX_HEAD:
                raise MalformedError("the name is missing")
            yield
        call = follower.begin(head[1], head.end())
        stop = yield from _ARGUMENTS.follow(follower, call, head.end())
        follower.check(lambda turn: first_call(self.read(turn, opening)))
        call.complete()
        return stop

    def _read_arguments(self, turn: Turn, name: str, start: int) -> tuple[dict[str, Any], int]:
        arguments: dict[str, object] = {}
        at = start
        while pair := _KEY.match(turn.text, at):
            key = pair[1].strip()
            if key in arguments:
                raise MalformedError(f"the argument {key!r} is given twice")
            end = turn.search(_END_OF_VALUE, pair.end())
            if end is None or end.group() != _VALUE_CLOSE:
                raise MalformedError(f"the value of {key!r} has no {_VALUE_CLOSE} before <arg_key> or {_CLOSE}")
            arguments[key] = turn.types.convert(name, key, turn.text[pair.end() : end.start()], turn.max_depth)
            at = end.end()
        return arguments, at
