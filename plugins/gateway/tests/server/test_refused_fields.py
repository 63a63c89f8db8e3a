"""A refusal by the session, which knows no dialect, names the field of the dialect that the client has sent."""

import json

import pytest
from real_requests import TOOLS, make_engine, send

from turnwise_testing.engines.scripted import ScriptedEngine

FORMATS = {
    "chat": ("response_format", {"type": "json_object"}),
    "messages": ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
    "responses": ("text", {"format": {"type": "json_object"}}),
}
NAMED = {
    "chat": {"type": "function", "function": {"name": "add"}},
    "messages": {"type": "tool", "name": "add"},
    "responses": {"type": "function", "name": "add"},
}
PATHS = {"chat": "response_format", "messages": "output_config.format", "responses": "text.format"}
CASES = [
    *((dialect, {"model": "closed"}, "model") for dialect in FORMATS),
    *((dialect, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a") for dialect in FORMATS),
    *((dialect, {"enable_thinking": True}, "enable_thinking") for dialect in FORMATS),
    *((dialect, {name: form}, PATHS[dialect]) for dialect, (name, form) in FORMATS.items()),
    *((dialect, {"tools": TOOLS[dialect], "tool_choice": NAMED[dialect]}, "tool_choice") for dialect in FORMATS),
    ("chat", {"stop": "x"}, "stop"),
    ("messages", {"stop_sequences": ["x"]}, "stop_sequences"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("dialect", "body", "param"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refused_field_has_its_name(dialect, body, param, stream):
    """In the sentence, which all dialects have, and in `param`, where the dialect has it."""
    (sent,) = send(
        dialect, body | {"stream": stream}, engine=lambda probe: ScriptedEngine([1]), models={"closed": "refuse"}
    )

    assert (400, True) == (sent.status, f"'{param}'" in sent.message), sent
    assert sent.body["error"].get("param", param) == param


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_bytes_of_tokens_are_those_of_the_text(dialect):
    """A token that is a part of a character has no bytes, since they are not known; the others spell the text."""
    text = "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600!"

    def make(probe):
        ids = [*probe.chat.tokenizer.encode(text), probe.chat.stop_token_ids[0]]
        return ScriptedEngine(lambda _request: ids, capabilities=make_engine(probe).capabilities)

    asked = {"logprobs": True} if dialect == "chat" else {"include": ["message.output_text.logprobs"]}
    (sent,) = send(dialect, asked, engine=make)

    found = (
        sent.body["choices"][0]["logprobs"]["content"]
        if dialect == "chat"
        else sent.body["output"][0]["content"][0]["logprobs"]
    )
    assert {None} < {type(each["bytes"]) if each["bytes"] else None for each in found}, json.dumps(found)
    for each in found:
        assert each["bytes"] == (None if "\ufffd" in each["token"] else list(each["token"].encode())), each
    known = b"".join(bytes(each["bytes"] or b"") for each in found)
    assert known.startswith(b"Gr")
