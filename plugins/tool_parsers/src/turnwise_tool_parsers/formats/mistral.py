"""
Mistral: JSON objects in square brackets after `[TOOL_CALLS]`, or a name and its arguments after each of them.

    calls = "[TOOL_CALLS]" "[" object {"," object} "]"                                  tokenizers v3 and v7
          | "[TOOL_CALLS]" NAME ["[CALL_ID]" ID] ["[ARGS]"] OBJECT                      tokenizers v11 and v13

Source: `mistral_common`, whose tokenizers v11 write `[CALL_ID]` and `[ARGS]`, and v13 `[ARGS]` only; and the chat
template of Mistral-7B-Instruct-v0.3 for the list, whose objects have an `id` beside the name.
In the second form each parallel call has its own `[TOOL_CALLS]`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.call_frame import CallFrame, frame_list
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import follow_arguments, follow_json_calls
from turnwise_tool_formats.turn import Found, FramedGrammar, Turn, TurnFollower, read_json_calls, with_id

_HEAD = re.compile(r"\s*+([^\s\[{]{1,256}+)\s*+(?:\[CALL_ID\]\s*+([^\s\[{]{0,64}+)\s*+)?(?:\[ARGS\])?")
_BRACKET = re.compile(r"\{")
_NEXT = re.compile(r"\s*+[,;]?\s*+(?=[\w.\-]{1,256}+\s*+(?:\[CALL_ID\]\s*+[^\s\[{]{0,64}+\s*+)?\[ARGS\])")


class Mistral(FramedGrammar):
    """The format `mistral`."""

    name = "mistral"
    form = '[TOOL_CALLS][{"name": "<tool>", "arguments": {...}}], or [TOOL_CALLS]<tool>[ARGS]{...} for each call.'
    opening = re.escape("[TOOL_CALLS]")

    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        if "[ARGS]" in tags:
            return CallFrame(f"[TOOL_CALLS]{name}[ARGS]", "", "", openings=("[TOOL_CALLS]",))
        return frame_list("[TOOL_CALLS][", name, "]", ("[TOOL_CALLS]",))

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = turn.skip_space(opening.end())
        head = _HEAD.match(turn.text, start)
        if head is None:
            return read_json_calls(turn, start)
        calls: list[ToolCall] = []
        while head:
            try:
                arguments, stop = turn.read_value(read_json, head.end())
            except MalformedError as error:
                found, stop = turn.refuse_to_next_tag(str(error), start, head.end(), head[1])
                return [*calls, *(with_id(call, head[2]) for call in found)], stop
            calls.append(with_id(turn.build(head[1], arguments, turn.text[start:stop]), head[2]))
            joined = _NEXT.match(turn.text, stop)
            start = joined.end() if joined else stop
            head = _HEAD.match(turn.text, start) if joined else None
        return calls, stop

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        start = yield from follower.skip_space(opening.end())
        if follower.text[start] in "[{":
            return (yield from follow_json_calls(follower, start, self.argument_keys, waits_for_id=True))
        while True:
            stop = yield from self._follow_named(follower, start)
            joined = yield from follower.joins(_NEXT, stop)
            if joined is None:
                return stop
            start = joined.end()

    def _follow_named(self, follower: TurnFollower, start: int) -> Waiting[int]:
        """Follow and complete a call with its name before its arguments; return the index after them."""
        bracket = yield from follower.search(_BRACKET, start)
        head = _HEAD.match(follower.text, start)
        if head is None or follower.text[head.end() : bracket.start()].strip(" \t\n\r"):
            raise MalformedError("another text comes next")
        call = follower.begin(head[1], head.end(), with_id(ToolCall(), head[2]).id)
        stop = yield from follow_arguments(follower, call, head.end())

        def read(turn: Turn) -> ToolCall:
            return turn.build(head[1], turn.read_value(read_json, head.end())[0], "")

        follower.check(read)
        call.complete()
        return stop
