"""Tests of `turnwise.messages`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.messages import build_turn_message, format_arguments, name_call
from turnwise.types import ToolCall

arguments = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3)


@given(st.text(), st.lists(st.builds(ToolCall, name=st.text(), arguments=arguments), max_size=3), st.integers(0, 999))
def test_a_message_has_the_calls_of_the_turn(content, calls, turn):
    """Names, arguments and ids come back from the message, and ids have nine letters and digits."""
    ids = [name_call(turn, index) for index in range(len(calls))]

    message = json.loads(json.dumps(build_turn_message(content, calls, ids)))

    found = message.get("tool_calls", [])
    assert (message["role"], message["content"], "tool_calls" in message) == ("assistant", content, bool(calls))
    assert [call["id"] for call in found] == ids
    assert all(len(name) == 9 and name.isalnum() for name in ids)
    read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
    assert read == [(call.name, call.arguments) for call in calls]


def test_a_malformed_call_keeps_its_text():
    """The model reads its own text again, and a call needs an id."""
    call = ToolCall(error="Error: malformed", raw='{"name": "ad')

    assert format_arguments(call) == call.raw
    with pytest.raises(ValueError, match="shorter"):
        build_turn_message("", [call], [])
