"""Requirements of a tool parser that reads the calls of a turn while it is sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import cast

from turnwise.messages import CallSoFar, TurnSoFar
from turnwise.protocols import StreamingParser, ToolParser
from turnwise.types import ToolCall, ToolSchema
from turnwise_testing.probes.engine import expect, expect_equal


def streaming_parser(parser: ToolParser) -> StreamingParser | None:
    """Return the parser if its class reads turns while they are sampled."""
    # A method of the class, as the gateway asks: a wrapper that forwards attributes may change what `parse` returns.
    return cast(StreamingParser, parser) if callable(getattr(type(parser), "follow", None)) else None


def expect_stream(
    parser: StreamingParser,
    tools: Sequence[ToolSchema],
    text: str,
    cuts: Iterable[int],
    parsed: tuple[str, Sequence[ToolCall]],
) -> TurnSoFar:
    """
    Read a turn in parts, and check the promises of `TurnStream`.

    Args:
        parser: under test.
        tools: of the prompt.
        text: of the turn.
        cuts: numbers of characters after which a part ends, in order.
        parsed: text and calls of the whole turn, as `parse` returns them.

    Returns:
        The whole turn.
    """
    stream = parser.follow(tools)
    before = TurnSoFar(texts=("",))
    for cut in cuts:
        now = stream.read(text[:cut])
        _expect_continues(before, now, f"after {text[:cut]!r}")
        before = now
    whole = stream.read(text, is_whole=True)
    _expect_continues(before, whole, f"at the end of {text!r}")
    expect_equal(parser.follow(tools).read(text, is_whole=True), whole, "the turn read at once, and in parts")
    _expect_parsed(whole, *parsed)
    return whole


def _expect_continues(before: TurnSoFar, now: TurnSoFar, place: str) -> None:
    expect_equal(len(now.texts), len(now.calls) + 1, f"number of texts {place}")
    expect(len(now.calls) >= len(before.calls), f"a call was taken back {place}")
    for number, (old, new) in enumerate(zip(before.texts, now.texts, strict=False)):
        may_grow = number == len(before.texts) - 1
        expect(new.startswith(old) if may_grow else new == old, f"the text {old!r} became {new!r} {place}")
    for earlier, later in zip(before.calls, now.calls, strict=False):
        expect_equal((later.name, later.id), (earlier.name, earlier.id), f"name and id of a call {place}")
        expect(
            later.arguments.startswith(earlier.arguments),
            f"the arguments {earlier.arguments!r} became {later.arguments!r} {place}",
        )
        expect(not earlier.is_complete or later == _with_late_id(earlier, later), f"a complete call changed {place}")


def _with_late_id(call: CallSoFar, later: CallSoFar) -> CallSoFar:
    return CallSoFar(name=call.name, arguments=call.arguments, is_complete=True, id=call.id, late_id=later.late_id)


def _expect_parsed(whole: TurnSoFar, text: str, calls: Sequence[ToolCall]) -> None:
    expect_equal("".join(whole.texts), text, "the text outside the calls")
    expect_equal([not call.error for call in calls], [call.is_complete for call in whole.calls], "the good calls")
    for parsed, call in zip(calls, whole.calls, strict=True):
        if not parsed.error:
            expect_equal((call.name, call.late_id or call.id), (parsed.name, parsed.id), "name and id of a call")
            expect_equal(json.loads(call.arguments), dict(parsed.arguments), "the arguments of a call")
