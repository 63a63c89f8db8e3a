"""The conformance check of parsers that read a turn while it is sampled: a good one passes, and bad ones are caught."""

import json
import re
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve

from turnwise.messages import CallSoFar, TurnSoFar, format_arguments
from turnwise_testing.checks.parser import PARSER_CHECKS, ParserProbe
from turnwise_testing.probes.agent import ProbeParser, probe_chat

CHAT = probe_chat()


def parser_probe(parser):
    return ParserProbe(
        parser=parser,
        chat=CHAT,
        write_call=lambda name, arguments: (
            f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        ),
        malformed=("<tool_call>{</tool_call>", "<tool_call>"),
    )


def keeps(turn, _text, _is_whole):
    return turn


@define
class Streamed(ProbeParser):
    """A parser that has all of a turn at its end, unless `change` makes something else of what it returns."""

    change: Any = keeps

    def follow(self, _tools):
        return StreamedTurn(self)


@define
class StreamedTurn:
    """A turn of `Streamed`."""

    parser: Any

    def read(self, text, *, is_whole=False):
        content, calls = self.parser.parse(np.array(CHAT.tokenizer.encode(text), np.int32)) if is_whole else ("", ())
        found = tuple(
            CallSoFar(name=call.name, arguments=format_arguments(call), is_complete=not call.error) for call in calls
        )
        turn = TurnSoFar(texts=(content, *[""] * len(calls)), calls=found)
        return self.parser.change(turn, text, is_whole)


def shows_the_text(turn, text, is_whole):
    return turn if is_whole else evolve(turn, texts=(text,))


def shows_a_call(turn, text, is_whole):
    if is_whole or not text.startswith("<tool_call>") or text.count("<tool_call>") > 1:
        return turn
    return TurnSoFar(texts=("", ""), calls=(CallSoFar(name="other"),))


def loses_the_text(turn, _text, is_whole):
    return evolve(turn, texts=("", *turn.texts[1:])) if is_whole else turn


def rewrites(turn, _text, is_whole):
    return evolve(turn, calls=tuple(evolve(each, arguments="{}") for each in turn.calls)) if is_whole else turn


class TestStreamChecks:
    """Tool parsers that read a turn while it is sampled."""

    check = staticmethod(PARSER_CHECKS["a_stream_of_a_turn_takes_nothing_back"])

    def test_a_parser_may_have_all_at_the_end(self):
        """It takes nothing back."""
        assert self.check(parser_probe(Streamed(CHAT))) is None

    def test_a_parser_need_not_stream(self):
        """The check says why it does not apply."""
        assert self.check(parser_probe(ProbeParser(CHAT))) == "the parser has no method `follow`"

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (shows_the_text, "the text"),
            (shows_a_call, "a call was taken back"),
            (loses_the_text, "the text outside the calls"),
            (rewrites, "the arguments of a call"),
            (lambda turn, _text, _is_whole: evolve(turn, texts=(*turn.texts, "")), "number of texts"),
        ],
    )
    def test_a_bad_stream_is_caught(self, change, text):
        """The check finds a parser by the part that it took back."""
        with pytest.raises(AssertionError, match=re.escape(text)):
            self.check(parser_probe(Streamed(CHAT, change)))
