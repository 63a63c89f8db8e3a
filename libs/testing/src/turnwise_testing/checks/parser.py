"""
Requirements of every tool parser, as plain functions without pytest.

A check takes a `ParserProbe` and raises `AssertionError` with a text that describes the failure. Not covered: the
fine points of a format, such as tags inside arguments or reasoning; a parser's own tests say those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from turnwise.messages import build_turn_message
from turnwise.protocols import Chat, ToolParser
from turnwise.types import ToolCall, ToolSchema, as_token_array
from turnwise_testing.checks.check import register
from turnwise_testing.checks.parser_stream import expect_stream, streaming_parser
from turnwise_testing.checks.parser_turns import CONTENTS, ECHOES, Call, random_calls, random_cuts, schemas_of
from turnwise_testing.probes.engine import expect, expect_equal

Parsed = tuple[str, tuple[ToolCall, ...]]

_NUM_TURNS = 60
_NUM_CUT_TURNS = 8
_NUM_STREAMED_TURNS = 6
PLAIN_TEXTS = (
    "",
    "The answer is 42.",
    "Two\nlines,  spaces \t and a tab.\n",
    'JSON that is no call: {"name": "add", "arguments": {}}',
    "<b>tags</b> of another kind, 1 < 2 > 0, and &lt;",
    "Grüße, 世界 🌍",
)
ARGUMENTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"query": "plain"},
    {"n": -3, "x": 2.5, "yes": True, "nothing": None},
    {"text": 'quotes " and \\ back\nslashes', "more": "Grüße 世界 🌍"},
    {"nested": {"list": [1, [2, {"deep": []}]], "empty": {}}},
)


@frozen(kw_only=True)
class ParserProbe:
    """
    The probe of a parser.

    Attributes:
        parser: under test.
        chat: whose tokenizer it reads with.
        write_call: writes a call, from a name and arguments, as the model would.
        malformed: texts of calls that cannot be run, each with at least one.
        tags_are_tokens: the parser finds tags by their ids, so a tag spelled in other tokens is not one.
        typed_arguments: the format writes any JSON value; else each argument is a text, and comes back as one.
        quotes_calls: the text of an argument may hold a whole call of the format.
        can_write: returns whether the format can write the arguments of a call.
        parser_of: builds the parser for tools with these schemas; None if the parser needs none.
    """

    parser: ToolParser
    chat: Chat
    write_call: Callable[[str, Mapping[str, Any]], str]
    malformed: tuple[str, ...] = ()
    tags_are_tokens: bool = False
    typed_arguments: bool = True
    quotes_calls: bool = False
    can_write: Callable[[Mapping[str, Any]], bool] = lambda _arguments: True
    parser_of: Callable[[Sequence[ToolSchema]], ToolParser] | None = None

    @property
    def arguments(self) -> tuple[Mapping[str, Any], ...]:
        """Arguments that the format can write."""
        if self.typed_arguments:
            return ARGUMENTS
        return tuple({key: _as_text(value) for key, value in arguments.items()} for arguments in ARGUMENTS)

    def random_turns(self, num_turns: int) -> Iterator[tuple[ParserProbe, str, list[Call]]]:
        """Yield turns: a probe whose parser knows the tools, the content, and the calls; the same each time."""
        quoted = self.write_call("inner", {"a": "b"}) if self.quotes_calls else ""
        for seed in range(num_turns):
            calls = random_calls(seed, typed=self.typed_arguments, quoted=quoted)
            calls = [call for call in calls if self.can_write(call[1])]
            probe = self if self.parser_of is None else evolve(self, parser=self.parser_of(schemas_of(calls)))
            yield probe, CONTENTS[seed % len(CONTENTS)], calls

    def write(self, content: str, calls: Sequence[Call]) -> str:
        """Return the text of a turn."""
        return content + "\n".join(self.write_call(name, arguments) for name, arguments in calls)

    def parse(self, text: str) -> Parsed:
        """Parse a text as the tokenizer encodes it."""
        return self.parse_ids(self.chat.tokenizer.encode(text))

    def parse_ids(self, token_ids: Sequence[int]) -> Parsed:
        """Parse ids, and check the properties of every result."""
        ids = as_token_array(token_ids)
        before = ids.copy()
        content, calls = self.parser.parse(ids)
        expect(np.array_equal(ids, before), "parse changed the ids that it was given")
        expect(isinstance(content, str), f"the content is a {type(content).__name__}, not a string")
        expect(isinstance(calls, tuple), f"the calls are a {type(calls).__name__}, not a tuple")
        for call in calls:
            _expect_call(call)
        return content, calls

    def good_turn(self) -> str:
        """Return a turn with text around two calls."""
        calls = [self.write_call(f"tool_{i}", arguments) for i, arguments in enumerate(self.arguments[-2:])]
        return f"First {calls[0]} then {calls[1]} done."


ParserCheck = Callable[[ParserProbe], str | None]

PARSER_CHECKS: dict[str, ParserCheck] = {}
"""Every check by the name of its function without `check_`."""


_check = register(PARSER_CHECKS)


@_check
def check_fulfils_the_protocol(probe: ParserProbe) -> None:
    """The factory returns something with the method of a parser."""
    expect(isinstance(probe.parser, ToolParser), "it is no ToolParser: it has no method `parse`")


@_check
def check_plain_text_has_no_calls(probe: ParserProbe) -> None:
    """A text without calls comes back as it is."""
    for text in PLAIN_TEXTS:
        expect_equal(probe.parse(text), (text, ()), "a text without calls")


@_check
def check_a_good_call_is_found(probe: ParserProbe) -> None:
    """Name and arguments equal the written ones, for any JSON value, or any text in a format without types."""
    for arguments in probe.arguments:
        _content, calls = probe.parse(probe.write_call("some_tool", arguments))
        _expect_calls(calls, [("some_tool", arguments)])


@_check
def check_calls_keep_their_order(probe: ParserProbe) -> None:
    """Several calls of one turn are found in order, and the text around them is the content."""
    expected = [(f"tool_{i}", arguments) for i, arguments in enumerate(probe.arguments)]
    written = [probe.write_call(name, arguments) for name, arguments in expected]
    content, calls = probe.parse("Before. " + "\n".join(written) + " After.")
    _expect_calls(calls, expected)
    expect_equal(content.split(), ["Before.", "After."], "words of the text around the calls")


@_check
def check_end_of_turn_changes_nothing(probe: ParserProbe) -> None:
    """The end-of-turn token that an engine returns with a turn is no part of a call."""
    ids = probe.chat.tokenizer.encode(probe.write_call("some_tool", probe.arguments[2]))
    for stop in probe.chat.stop_token_ids:
        _content, calls = probe.parse_ids([*ids, stop])
        _expect_calls(calls, [("some_tool", probe.arguments[2])])


@_check
def check_malformed_is_a_value(probe: ParserProbe) -> None:
    """A malformed call is a `ToolCall` with a text for the model in `error`; nothing is raised."""
    expect(bool(probe.malformed), "give the probe texts of malformed calls")
    for text in probe.malformed:
        _content, calls = probe.parse(text)
        expect(any(call.error for call in calls), f"no call with an error in {text!r}: {calls!r}")


@_check
def check_a_turn_may_be_cut_anywhere(probe: ParserProbe) -> None:
    """Every prefix of a turn parses, and calls that ended before the cut are found."""
    ids = probe.chat.tokenizer.encode(probe.good_turn())
    whole = probe.parse_ids(ids)[1]
    for stop in range(len(ids)):
        calls = [call for call in probe.parse_ids(ids[:stop])[1] if not call.error]
        expect_equal(calls, list(whole[: len(calls)]), f"good calls in the first {stop} tokens")


@_check
def check_random_conversations(probe: ParserProbe) -> None:
    """Random calls with odd texts come back from a turn, and its other text is the content."""
    for own, content, calls in probe.random_turns(_NUM_TURNS):
        found, parsed = own.parse(own.write(content, calls))
        _expect_calls(parsed, calls)
        expect_equal(found.split(), content.split(), "words of the text around the calls")


@_check
def check_a_turn_may_be_cut_at_every_character(probe: ParserProbe) -> None:
    """No beginning of a random turn has a call that the turn lacks, and `settled` takes no text back."""
    for own, content, calls in probe.random_turns(_NUM_CUT_TURNS):
        text = own.write(content, calls)
        whole, parsed = own.parse(text)
        good = [call for call in parsed if not call.error]
        settled = getattr(own.parser, "settled", None)
        for stop in range(len(text)):
            found = [call for call in own.parse(text[:stop])[1] if not call.error]
            expect_equal(found, good[: len(found)], f"good calls in {text[:stop]!r}")
            decided = text[: settled(text[:stop])] if settled is not None else ""
            expect(whole.startswith(decided), f"settled({text[:stop]!r}) counts more than the content {whole!r} has")


@_check
def check_a_stream_of_a_turn_takes_nothing_back(probe: ParserProbe) -> str | None:
    """The calls of a turn that is being sampled only grow, until the turn is whole, wherever it is cut."""
    if streaming_parser(probe.parser) is None:
        return "the parser has no method `follow`"
    for number, (own, content, calls) in enumerate(probe.random_turns(_NUM_STREAMED_TURNS)):
        text, tools = own.write(content, calls), schemas_of(calls)
        bad = own.malformed[number % len(own.malformed)] if own.malformed else ""
        for turn in (text, text + bad, content + bad + text, text[: len(text) * (number % 7) // 7] + bad):
            parser = streaming_parser(own.parser)
            assert parser is not None, "parsers of one class stream, or none does"
            for cuts in (range(len(turn) + 1), random_cuts(len(turn), number)):
                expect_stream(parser, tools, turn, cuts, own.parse(turn))
    return None


@_check
def check_calls_that_clients_send_back(probe: ParserProbe) -> None:
    """Arguments that a client has written again, in its own JSON, are the same call when a template renders them."""
    for own, _content, calls in probe.random_turns(_NUM_CUT_TURNS):
        parsed = own.parse(own.write("", calls))[1]
        for name, echo in ECHOES.items():
            message = build_turn_message("", parsed, [f"call{index:05d}" for index in range(len(parsed))])
            functions = [call["function"] for call in message.get("tool_calls", ())]
            echoed = [(each["name"], json.loads(echo(each["arguments"]))) for each in functions]
            expect_equal(echoed, [(call, dict(arguments)) for call, arguments in calls], f"calls of an echo, {name}")
            _expect_calls(own.parse(own.write("", echoed))[1], calls)


@_check
def check_splitting_changes_nothing(probe: ParserProbe) -> str | None:
    """The same text in other tokens has the same calls."""
    if probe.tags_are_tokens:
        return "the parser finds tags by their ids"
    for text in (probe.good_turn(), *probe.malformed):
        one_by_one = [token_id for char in text for token_id in probe.chat.tokenizer.encode(char)]
        expect_equal(probe.parse_ids(one_by_one), probe.parse(text), f"{text!r}, each character by itself")
    return None


@_check
def check_any_ids_have_an_answer(probe: ParserProbe) -> None:
    """Shuffled turns, bytes at random and ids beyond the vocabulary are parsed without raising."""
    for ids in _odd_ids(probe):
        probe.parse_ids(ids)


@_check
def check_is_repeatable(probe: ParserProbe) -> None:
    """The parser keeps nothing: the same ids have the same answer, whatever came between."""
    texts = (probe.good_turn(), *probe.malformed, *PLAIN_TEXTS)
    first = [probe.parse(text) for text in texts]
    expect_equal([probe.parse(text) for text in reversed(texts)], first[::-1], "the same turns again")


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def run_parser_checks(probe: ParserProbe, names: Iterable[str] = PARSER_CHECKS) -> None:
    """Run checks one after the other; the first that fails raises."""
    for name in names:
        PARSER_CHECKS[name](probe)


def _odd_ids(probe: ParserProbe) -> Iterator[list[int]]:
    generator = np.random.default_rng(0)
    for text in (probe.good_turn(), *probe.malformed):
        ids = probe.chat.tokenizer.encode(text)
        for _ in range(20):
            yield generator.permutation(ids).tolist()
            yield generator.choice(ids, 2 * len(ids)).tolist()
            start = int(generator.integers(len(ids)))
            yield [*ids[start:], *ids[:start], *ids]
    for bound in (128, 256, 300, 100_000, 2**31 - 1):
        for _ in range(10):
            yield generator.integers(0, bound, 64).tolist()


def _expect_call(call: ToolCall) -> None:
    expect(isinstance(call, ToolCall), f"a call is a {type(call).__name__}, not a ToolCall")
    if call.error:
        return
    expect(isinstance(call.name, str) and bool(call.name), f"a call without an error has the name {call.name!r}")
    try:
        same = json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
    except (TypeError, ValueError, RecursionError) as error:
        raise AssertionError(f"arguments of a call without an error are not JSON: {error}") from error
    expect(same, f"arguments of a call change in JSON: {call.arguments!r}")


def _expect_calls(calls: Sequence[ToolCall], expected: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    expect_equal([call.error for call in calls], [""] * len(expected), "errors of good calls")
    expect_equal([(call.name, dict(call.arguments)) for call in calls], list(expected), "calls")
