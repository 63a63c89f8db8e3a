"""Calls are read while they are sampled, and all that was read stays."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_turns import CONTENTS, calls_of
from test_round_trip import PIECES

from turnwise_testing.checks.parser_stream import expect_stream

TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)


def schemas(resources):
    return [tool.schema for tool in resources.tools.values()]


@st.composite
def cuts_of(draw, text):
    """Return places in a text at which a stream may read it: few, or all of them."""
    if draw(st.booleans()):
        return range(len(text) + 1)
    return sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))


@pytest.mark.many_cases
@given(st.data())
def test_rendered_turns(turn, render, parser_for, resources_of, data):
    """Each call is open before its end, and its arguments are those that `parse` finds."""
    calls = data.draw(calls_of(turn))
    resources = resources_of(*calls)
    parser = parser_for(turn, resources)
    text = render(turn, data.draw(CONTENTS), calls)

    whole = expect_stream(parser, schemas(resources), text, data.draw(cuts_of(text)), parser.parse_text(text))

    assert calls == [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.many_cases
@given(st.data())
def test_cut_and_broken_turns(turn, render, parser_for, resources_of, data):
    """A turn of which a part is missing, and one with another text in the middle."""
    calls = data.draw(calls_of(turn))
    resources = resources_of(*calls)
    parser = parser_for(turn, resources)
    text = render(turn, data.draw(CONTENTS), calls)
    first, last = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    text = text[:first] + data.draw(st.sampled_from(PIECES) | st.text(max_size=3) | st.just("")) + text[last:]

    expect_stream(parser, schemas(resources), text, data.draw(cuts_of(text)), parser.parse_text(text))


@pytest.mark.many_cases
@given(st.data())
def test_any_text(turn, parser_for, data):
    """Tags in any order, whole or broken."""
    text = data.draw(TEXTS)
    parser = parser_for(turn)

    expect_stream(parser, [], text, data.draw(cuts_of(text)), parser.parse_text(text))


def test_hand_written_turns(case, parser_for, hand_written_tools, resources_of):
    """Turns as models write them, a character at a time."""
    parser = parser_for(case["format"])
    tools = list(hand_written_tools.values())
    text = case["text"]

    expect_stream(parser, tools, text, range(len(text) + 1), parser_for(case["format"]).parse_content(text, tools))
