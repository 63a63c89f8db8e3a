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


def parts_of(parser, tools, text):
    """Return each state of the calls of a turn that comes a character at a time: name, arguments, and whether whole."""
    stream = parser.follow(tools)
    found = [stream.read(text[:cut]).calls for cut in range(len(text) + 1)]
    return list(dict.fromkeys(tuple((c.name, c.arguments, c.is_complete) for c in calls) for calls in found))


@pytest.mark.parametrize("known", [True, False])
def test_a_call_of_an_unknown_tool_comes_when_it_is_complete(turn, render, parser_for, resources_of, known):
    """Its name may be prose behind a tag; a known one has its arguments as they come, unless its id comes last."""
    calls = [("write", {"text": "one two", "n": 1})]
    resources = resources_of(*calls)
    text = render(turn, "", calls)

    parts = parts_of(parser_for(turn, resources), schemas(resources) if known else [], text)

    assert (len(parts) > 5) is (known and turn != "mistral")
    assert [True] == [is_complete for _, _, is_complete in parts[-1]]


def test_the_last_bracket_comes_with_the_decision(turn, render, parser_for, resources_of):
    """Before a call is complete, no client can take its arguments for whole ones."""
    calls = [("write", {"text": "a", "more": "b"})]
    resources = resources_of(*calls)

    for found in parts_of(parser_for(turn, resources), schemas(resources), render(turn, "", calls)):
        assert all(is_complete or not arguments.endswith("}") for _, arguments, is_complete in found)
