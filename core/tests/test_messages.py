"""Tests of `turnwise.messages`."""

import asyncio
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import TemplateError
from turnwise.messages import LONG_CHARS, build_turn_message, encode_beside_loop, format_arguments, name_call
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


class TestLongMessages:
    """Rendering and encoding of long messages leave the event loop to the other episodes."""

    @pytest.mark.parametrize("parts", [str, lambda text: [{"type": "text", "text": text}]], ids=["text", "parts"])
    @pytest.mark.parametrize(("num_chars", "beside"), [(LONG_CHARS - 1, False), (LONG_CHARS, True), (10**6, True)])
    def test_the_loop_goes_on_beside_long_messages(self, num_chars, beside, parts):
        """The function ends only after the loop has run something else."""

        async def main():
            went_on = threading.Event()
            asyncio.get_running_loop().call_soon(went_on.set)

            def encode():
                return np.array([went_on.wait(30 if beside else 0)])

            half = num_chars // 2
            messages = [
                {"role": "system", "content": None},
                *({"role": "user", "content": parts("x" * length)} for length in (half, num_chars - half)),
            ]
            return await encode_beside_loop(messages, encode)

        assert [beside] == asyncio.run(main()).tolist()

    def test_one_thread_encodes_at_a_time(self):
        """Calls beside each other wait for each other, not for the loop."""
        running, most = [], []

        def encode():
            running.append(1)
            most.append(len(running))
            threading.Event().wait(0.001)
            running.pop()
            return np.array([len(most)])

        async def main():
            message = {"role": "user", "content": "x" * LONG_CHARS}
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(encode_beside_loop([message], encode)) for _ in range(20)]
            return [call.result() for call in calls]

        assert list(range(1, 21)) == sorted(int(ids[0]) for ids in asyncio.run(main()))
        assert set(most) == {1}

    def test_an_exception_comes_back(self):
        """A template that refuses a long message fails where it is asked."""

        def refuse():
            raise TemplateError("too odd")

        with pytest.raises(TemplateError, match="too odd"):
            asyncio.run(encode_beside_loop([{"role": "user", "content": "x" * LONG_CHARS}], refuse))
