"""Conversations that a chat refuses: each is a 400 in the dialect's form and in one line, and the session lives on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import pytest
from aiohttp import ClientSession
from attrs import frozen
from hostile_bodies import COUNT_PATH, PATHS
from session_scenarios import Sessions
from structlog.testing import capture_logs

from turnwise import Chat
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.session import Session
from turnwise_testing.inputs.tokenizers import byte_tokenizer

CALL: Final = {"id": "abcdefgh0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
STRICT: Final = """
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no\nrole ' + m.role) }}{% endif %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{%- if m.role == 'user' and not m.content %}{{ raise_exception('a user says something') }}{% endif %}
{%- if m.role == 'tool' %}{% set before = messages[loop.index0 - 1] %}
{%- if before.role not in ['assistant', 'tool'] %}{{ raise_exception('a result needs a call') }}{% endif %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{%- if call.function.name == 'bad' %}{{ raise_exception('no name of a tool') }}{% endif %}
{{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@cache
def chats() -> Mapping[str, Chat]:
    """Return chats that refuse different things."""
    return {
        "chatml": ChatTemplate(byte_tokenizer()),
        "strict": ChatTemplate(byte_tokenizer(STRICT)),
        "no special tokens": ChatTemplate(byte_tokenizer(STRICT), special_tokens="refuse"),
    }


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


FINE: Final = [user("Question 0?")]
TURN: Final = {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}
RESULT: Final = {"role": "tool", "tool_call_id": "abcdefgh0", "content": "2"}
ODD: Final[dict[str, list[dict[str, Any]]]] = {
    "system in the middle": [*FINE, {"role": "system", "content": "Be good."}],
    "system behind a turn": [*FINE, TURN, RESULT, {"role": "system", "content": "Be good."}],
    "only system": [{"role": "system", "content": "Be good."}],
    "unknown role": [*FINE, {"role": "narrator", "content": "Then"}],
    "developer": [*FINE, {"role": "developer", "content": "Then"}],
    "no message": [],
    "empty message": [user("")],
    "empty parts": [user([])],
    "blank message": [user(" \n")],
    "no content": [{"role": "user"}],
    "two users": [*FINE, user("And?")],
    "starts with a turn": [{"role": "assistant", "content": "Yes."}],
    "ends with a turn": [*FINE, {"role": "assistant", "content": "Yes."}],
    "empty turn": [*FINE, {"role": "assistant", "content": ""}, user("And?")],
    "result without a call": [*FINE, RESULT],
    "result first": [RESULT],
    "result of another call": [*FINE, TURN, {**RESULT, "tool_call_id": "other"}],
    "call without a result": [*FINE, TURN, user("And?")],
    "arguments are no object": [
        *FINE,
        {**TURN, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[1"}}]},
        RESULT,
    ],
    "refused name": [*FINE, {**TURN, "tool_calls": [{**CALL, "function": {"name": "bad", "arguments": "{}"}}]}, RESULT],
    "special token": [user("<|im_end|>")],
    "special token in system": [{"role": "system", "content": "<|im_start|>"}, *FINE],
    "special token behind a turn": [*FINE, {"role": "assistant", "content": "Yes."}, user("a <|im_end|> b")],
    "special token in a result": [*FINE, TURN, {**RESULT, "content": "<|im_end|>"}],
    "special token in arguments": [
        *FINE,
        {**TURN, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": "<|im_end|>"}'}}]},
        RESULT,
    ],
    "special token in a long text": [user("<|im_end|>" + "word " * 20_000)],
}


def write_body(dialect: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return messages in the form of a dialect, as far as it has one for them."""
    if dialect == "chat":
        return {"messages": messages}
    if dialect == "messages":
        return {"messages": [_as_message(each) for each in messages], "max_tokens": 9}
    return {"input": [item for each in messages for item in _as_items(each)]}


def _as_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return user([result])
    calls = [
        {"type": "tool_use", "id": each["id"], "name": each["function"]["name"], "input": _object(each)}
        for each in message.get("tool_calls", ())
    ]
    parts = [{"type": "text", "text": message.get("content")}, *calls]
    return {"role": message["role"], "content": parts} if calls else message


def _object(call: dict[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]


def _as_items(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": each["id"], **each["function"]} for each in message.get("tool_calls", ())
    ]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, *calls]


@frozen
class Answered:
    """The answers to an odd request and to a fine one behind it, and what the session and the log have of them."""

    status: int
    error: dict[str, Any]
    next_status: int
    lines: list[Any]
    counts: Mapping[str, float]


def ask(chat: Chat, body: dict[str, Any], path: str, dialect: str) -> Answered:
    """Send a request, and then one that nothing is wrong with, to one session."""
    found: list[tuple[int, Any]] = []

    async def converse(session: Session) -> None:
        directory = SessionDirectory("m")
        headers = {"Authorization": f"Bearer {directory.add('s-1', session)}"}
        async with GatewayServer(directory) as server, ClientSession(headers=headers) as client:
            for url, each in ((path, body), (PATHS[dialect], write_body(dialect, FINE))):
                async with client.post(server.url() + url, json={"model": "m", **each}) as response:
                    found.append((response.status, await response.json()))

    with capture_logs() as lines:
        done = Sessions(chat=chat).run(converse, limits={"prompt_length": 1 << 18})
    (status, answer), (next_status, _answer) = found
    return Answered(status, answer.get("error") or {}, next_status, lines, done.counts)


@pytest.mark.many_cases
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", ["chatml", "strict", "no special tokens"])
def test_an_odd_conversation_is_answered_or_refused(name: str, dialect: str) -> None:
    """No conversation of a client is an error of the server, and the next request of its session has an answer."""
    wrong, refused = {}, set()
    for case, messages in ODD.items():
        done = ask(chats()[name], write_body(dialect, messages), PATHS[dialect], dialect)
        message = done.error.get("message", "")
        is_right = done.status == 200 or (done.status == 400 and message and "\n" not in message)
        if not is_right or done.next_status != 200 or any(line["log_level"] == "error" for line in done.lines):
            wrong[case] = (done.status, done.error, done.next_status)
        if done.status == 400:
            refused.add(case)

    assert {} == wrong
    assert "no message" in refused
    assert {case for case in ODD if "special" in case} <= refused or name != "no special tokens"


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("case", ["special token", "special token behind a turn", "special token in a long text"])
def test_a_refusal_of_the_data_is_one_of_the_chat(dialect: str, case: str) -> None:
    """It has the form and the count of a conversation that the template refuses."""
    done = ask(chats()["no special tokens"], write_body(dialect, ODD[case]), PATHS[dialect], dialect)

    assert (400, 200) == (done.status, done.next_status)
    assert done.error["message"].startswith("a message spells the special token '<|im_end|>'")
    assert "invalid_request_error" == done.error["type"]
    if dialect != "messages":
        assert ("messages", "invalid_value") == (done.error["param"], done.error["code"])
    assert (2, 1) == (done.counts["calls"], done.counts["refused_invalid"])


def test_a_count_of_tokens_is_refused_alike() -> None:
    """The route that only counts renders the same conversation."""
    body = write_body("messages", ODD["special token"])
    done = ask(chats()["no special tokens"], body, COUNT_PATH, "messages")

    assert (400, "invalid_request_error") == (done.status, done.error["type"])
    assert 200 == done.next_status


@pytest.mark.parametrize("dialect", PATHS)
def test_a_bug_of_a_chat_is_an_error_of_the_server(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client did nothing wrong, and is told nothing of it; the log has the traceback."""
    chat = ChatTemplate(byte_tokenizer(STRICT))

    def fail(*_arguments: object, **_options: object) -> Any:
        monkeypatch.undo()
        raise AssertionError("a bug")

    monkeypatch.setattr(chat, "prompt", fail)
    done = ask(chat, write_body(dialect, FINE), PATHS[dialect], dialect)

    assert (500, "the session failed to answer") == (done.status, done.error["message"])
    assert [("a session failed to answer a call", "a bug")] == [
        (line["event"], line["error"]) for line in done.lines if line["log_level"] == "error"
    ]
    assert 200 == done.next_status
