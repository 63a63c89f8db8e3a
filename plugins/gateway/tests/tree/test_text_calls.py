"""Tests of calls that come back as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.tree.text_calls import split_calls

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES | st.lists(VALUES, max_size=3), max_size=3)
CALLS = st.lists(st.tuples(st.text(max_size=5), ARGUMENTS), min_size=1, max_size=3)


@given(before=st.text(max_size=20), calls=CALLS)
def test_calls_are_split_from_any_text(before, calls):
    """The text before the calls comes back as it was, with the name of each call."""
    listed = [{"id": "a", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]

    text, found = split_calls(f"{before}\nCalling tools:\n{listed}")

    assert f"{before}\n" == text
    assert [name for name, _ in calls] == [name for name, _ in found]


@given(rest=st.text(max_size=30) | st.sampled_from(["]", "1]", "{}]", "'" * 9, "(" * 5000, "-" * 9000 + "1]", "0x]"]))
def test_any_other_text_stays(rest):
    """A text that is no list of calls is left alone, whatever Python says to it."""
    text = f"Calling tools:\n[{rest}"

    assert (text, ()) == split_calls(text)


@pytest.mark.parametrize(
    "listed",
    [
        "[]",
        "[1]",
        "[{}]",
        "[{'function': 1}]",
        "[{'function': {'name': 1}}]",
        "[{'function': {'name': 'a', 'arguments': {1, 2}}}]",
        "[{'function': {'name': 'a', 'arguments': {}}}, 1]",
        "[{'function': {'name': 'a', 'arguments': {}}}] done",
        "[__import__('os')]",
    ],
)
def test_other_lists_are_no_calls(listed):
    """A list of anything else is text, also when one item is a call."""
    text = f"Calling tools:\n{listed}"

    assert (text, ()) == split_calls(text)


def test_the_mark_begins_a_line():
    """Words in the middle of a line are text."""
    text = "I am Calling tools:\n[{'function': {'name': 'a', 'arguments': {}}}]"

    assert (text, ()) == split_calls(text)
