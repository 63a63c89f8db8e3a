"""A reply that a client sends back unchanged is read as the turn that it was."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.calls import CallOfTool, ModelReply, Usage
from turnwise_gateway.dialects import find_dialect, read_exchange

TEXTS = st.text(max_size=20)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans(), max_size=3).map(json.dumps) | st.sampled_from(
    ["", "{", "null", '{"a": NaN}', '{"INVALID_JSON": 5}']
)
USER = {"role": "user", "content": "Hi."}


@st.composite
def replies(draw):
    """Replies with reasoning, text and calls, malformed ones included."""
    return ModelReply(
        id="t1",
        content=draw(TEXTS),
        reasoning=draw(TEXTS),
        tool_calls=tuple(
            CallOfTool(id=f"c{n}", name="add", arguments=draw(ARGUMENTS)) for n in range(draw(st.integers(0, 3)))
        ),
        usage=Usage(prompt_tokens=1, completion_tokens=0),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
    )


def echo(dialect, reply, keep=lambda item: item):
    """The assistant's message of a request with the reply and, after it, a message of the user."""
    first = {"messages": [USER], "input": "Hi.", "max_tokens": 9, "include": ["reasoning.encrypted_content"]}
    written = json.loads(
        json.dumps(read_exchange(find_dialect(dialect), json.dumps(first).encode(), {}).write_reply(reply))
    )
    if dialect == "chat":
        turn = [written["choices"][0]["message"]]
    else:
        turn = [written] if dialect == "messages" else [keep(item) for item in written["output"]]
    conversation = [USER, *turn, USER]
    second = {"max_tokens": 9, "input" if dialect == "responses" else "messages": conversation}
    messages = read_exchange(find_dialect(dialect), json.dumps(second).encode(), {}).call.messages
    assert USER == messages[0] == messages[-1]
    return messages[1:-1]


def expected(reply, arguments=lambda text: text):
    """The message of a reply in the form of Chat Completions."""
    message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": arguments(each.arguments)}}
            for each in reply.tool_calls
        ]
    return message


def by_value(text):
    """Arguments as JSON values, or as text if they are no object."""

    def refuse(name):
        raise ValueError(name)

    try:
        values = json.loads(text, parse_constant=refuse)
    except ValueError:
        return text
    return values if isinstance(values, dict) else text


@given(replies())
def test_chat(reply):
    """Chat Completions keeps every text."""
    assert (expected(reply),) == echo("chat", reply)


@given(replies())
def test_messages(reply):
    """Messages keeps the values of arguments, and the text of arguments that are no JSON object."""
    (message,) = echo("messages", reply)
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = by_value(call["function"]["arguments"])

    assert expected(reply, by_value) == message


@pytest.mark.parametrize("drops_summary", [False, True])
@given(reply=replies())
def test_responses(reply, drops_summary):
    """Responses keeps every text, also for a client that sends back nothing but the encrypted reasoning."""

    def keep(item):
        return item | {"summary": []} if drops_summary and item["type"] == "reasoning" else item

    found = echo("responses", reply, keep)
    if reply.content or reply.reasoning or reply.tool_calls:
        assert (expected(reply),) == found
    else:
        assert () == found
