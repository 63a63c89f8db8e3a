"""The settled part of an unfinished turn is a part of the whole turn, however it continues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_turns import CONTENTS, calls_of
from test_round_trip import PIECES

from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)
THOUGHTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "</th", "ink>", " ", "\n", "a"]) | st.text(max_size=2), max_size=12
).map("".join)


def assert_settled(parser, text):
    """Check every cut of a text; return the cuts at which all of the text is settled."""
    content, _calls = parser.parse_text(text)
    sizes = [parser.settled(text[:cut]) for cut in range(len(text) + 1)]
    for cut, size in enumerate(sizes):
        assert size <= cut
        assert content.startswith(text[:size])
    assert sizes == sorted(sizes)
    return [cut for cut, size in enumerate(sizes) if size == cut]


@given(TEXTS)
def test_any_text(turn, parser_for, text):
    """Tags in any order, whole or broken."""
    assert_settled(parser_for(turn), text)


@given(TEXTS)
def test_any_text_after_the_start_of_reasoning(parser_for, text):
    """The chat template has opened the reasoning."""
    assert_settled(parser_for("hermes", starts_in_reasoning=True), text)


@pytest.mark.many_cases
@given(st.data())
def test_rendered_turns(turn, render, parser_for, data):
    """Content, and then calls as the model's chat template writes them."""
    assert_settled(parser_for(turn), render(turn, data.draw(CONTENTS), data.draw(calls_of(turn))))


def test_plain_text_is_settled_at_once(turn, parser_for):
    """Words and numbers are held back nowhere, but for white space before a recipient."""
    text = "The answer is 42, as it must be."
    free = [cut for cut in range(len(text) + 1) if turn[:7] != "gpt_oss" or not text[:cut].endswith((" ", "t", "f"))]
    assert set(free) <= set(assert_settled(parser_for(turn), text))


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", "I add. <tool", 7),
        ("hermes", "I add. <tool_call>{", 7),
        ("hermes", "I add. <tools>", 14),
        ("hermes", "<think>A <tool_call>", 20),
        ("hermes", "<think>A</think><tool_call>{", 16),
        ("llama3_json", ' {"na', 1),
        ("llama3_json", ' {"nb', 5),
        ("llama3_json", 'So {"na', 7),
        ("gpt_oss", "Now <|channel|>commentary to=f", 4),
        ("gpt_oss", "Now <|channel|>final<|message|>", 31),
        ("phi4", "I use functools", 6),
        ("phi4", "I use functools.", 16),
    ],
)
def test_text_that_may_become_a_call_is_held_back(parser_for, parser, text, expected):
    """From the first character that may belong to an opening."""
    assert expected == parser_for(parser).settled(text)


@given(THOUGHTS, st.sampled_from([ThinkTagsConfig(), ThinkTagsConfig(start="<think></think>")]))
def test_any_reasoning(text, config):
    """Both parts only grow, into those of the whole text."""
    tags = ThinkTags(config)
    before = ("", "")
    for cut in range(len(text) + 1):
        now = tags.settled(text[:cut])
        assert all(part.startswith(earlier) for part, earlier in zip(now, before, strict=True))
        before = now
    assert all(whole.startswith(part) for whole, part in zip(tags.split(text), before, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nI add </th", ("I add", "")),
        ("<think>I add.</think>\n4", ("I add.", "4")),
        ("I add.", ("", "")),
        ("I add.</think>4", ("I add.", "4")),
    ],
)
def test_reasoning_is_settled_while_it_comes(text, expected):
    """Behind its start tag at once; without one, text may become reasoning until an end tag comes."""
    assert expected == ThinkTags(ThinkTagsConfig()).settled(text)
