"""
Llama 4, and Llama 3.2 with its pythonic template: Python calls in square brackets.

    turn  = lists | text "<|python_start|>" lists ["<|python_end|>"]
    lists = list {[";" | ","] list}
    list  = "[" call {"," call} "]"
    call  = NAME "(" [KEY "=" VALUE {"," KEY "=" VALUE}] ")"

Source: Meta's chat template of Llama-4-Scout-17B-16E-Instruct, which says "Use exact format: [func_name1(param1=value1,
param2=value2), func_name2(...)]". Values are Python literals; `turnwise_tool_parsers.python_values` has the details.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from turnwise import ToolCall
from turnwise.types import JsonObject
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import follow_list
from turnwise_tool_formats.turn import Found, Turn, TurnFollower, WrittenGrammar, read_list
from turnwise_tool_parsers.python_stream import follow_python_call
from turnwise_tool_parsers.python_values import read_python_call

_TAG, _CLOSE = "<|python_start|>", "<|python_end|>"
_NEXT = re.compile(r"\s*+[,;]?\s*+\[(?=\s*+[^\W\d][\w.\-]{0,255}\()")


class Llama4Pythonic(WrittenGrammar):
    """The format `llama4_pythonic`."""

    name = "llama4_pythonic"
    form = '[<tool>(<argument>=<value>, ...)] and nothing else, with Python values such as "text", 1 or True.'
    opening = re.escape(_TAG)
    closing = (_CLOSE,)
    bare = re.compile(r"\[\s*[^\W\d][\w.\-]{0,255}\(")

    instructions = (
        "To call functions, respond with a list of calls in Python's syntax, and nothing else, such as "
        "[func_name1(param1=value1, param2=value2), func_name2(...)]. For example:"
    )

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        written = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        ]
        return f"{content}{_TAG if content else ''}[{', '.join(written)}]"

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = opening.end() if opening.group() == _TAG else opening.start()
        inside = turn.skip("[", start)
        if inside < 0:
            return turn.refuse_to_next_tag("expected '['", start, start)

        def read_item(at: int) -> tuple[ToolCall, int]:
            (name, arguments), stop = turn.read_value(read_python_call, at)
            return turn.build(name, arguments, turn.text[at:stop]), stop

        calls, stop = read_list(turn, inside, read_item)
        while turn.text.startswith("]", stop - 1) and (joined := _NEXT.match(turn.text, stop)):
            found, stop = read_list(turn, joined.end(), read_item)
            calls.extend(found)
        return calls, max(turn.skip(_CLOSE, stop), stop)

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        start = opening.end() if opening.group() == _TAG else opening.start()
        inside = yield from follower.require_tag("[", start)
        while True:
            stop = yield from follow_list(follower, inside, partial(follow_python_call, follower))
            joined = yield from follower.joins(_NEXT, stop)
            if joined is None:
                return (yield from follower.skip_tag((_CLOSE,), stop))[1]
            inside = joined.end()
