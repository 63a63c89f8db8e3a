"""Quirks of messages that people have, and the check that a prompt loses none of their texts."""

import json
import re

from real_templates import TEMPLATES

from turnwise.errors import TemplateError

UNUSABLE = ("llava", "idefics", "smolvlm")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}},
    },
}
USER = {"role": "user", "content": "USERTEXT"}


def calling(arguments='{"a": "ZEBRA"}', *, ids=("call00001",), **keys):
    """Return an assistant message with calls."""
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids],
    } | keys


def result(content="OUTCOME", call_id="call00001"):
    return {"role": "tool", "tool_call_id": call_id, "name": "add", "content": content}


ANSWER = {"role": "assistant", "content": "ANSWER"}
SYSTEM = {"role": "system", "content": "RULE1"}
DEVELOPER = {"role": "developer", "content": "RULE2"}
CALL, RESULT = calling(content=""), result()
SECOND = [calling(content="", ids=("call00002",)), result("RESULT2", "call00002")]
QUIRKS = {
    "developer first": [DEVELOPER, USER],
    "developer later": [USER, ANSWER, DEVELOPER, USER],
    "system": [SYSTEM, USER],
    "two systems": [SYSTEM, {"role": "system", "content": "RULE2"}, USER],
    "system and developer": [SYSTEM, DEVELOPER, USER],
    "system in between": [USER, ANSWER, SYSTEM, USER],
    "system last": [USER, SYSTEM],
    "empty system": [{"role": "system", "content": ""}, USER],
    "system alone": [SYSTEM],
    "two users": [USER, {"role": "user", "content": "AGAIN"}],
    "answer first": [ANSWER, USER],
    "answer last": [USER, ANSWER],
    "two answers": [USER, ANSWER, {"role": "assistant", "content": "MORE"}, USER],
    "no calls": [USER, ANSWER | {"tool_calls": []}, USER],
    "null calls": [USER, ANSWER | {"tool_calls": None}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "PART1"}, {"type": "text", "text": "PART2"}]}],
    "call": [USER, CALL, RESULT, USER],
    "call and null": [USER, calling(content=None), RESULT, USER],
    "call without content": [USER, calling(), RESULT, USER],
    "call and text": [USER, calling(content="THINKING"), RESULT, USER],
    "arguments as object": [USER, calling({"a": "ZEBRA"}, content=""), RESULT, USER],
    "empty arguments": [USER, calling("", content=""), RESULT, USER],
    "null arguments": [USER, calling(None, content=""), RESULT, USER],
    "cut arguments": [USER, calling('{"a": "ZEBRA', content=""), RESULT, USER],
    "list as arguments": [USER, calling('["ZEBRA"]', content=""), RESULT, USER],
    "two calls": [USER, calling(content="", ids=("call00001", "call00002")), RESULT, SECOND[1], USER],
    "result last": [USER, CALL, RESULT],
    "two turns of calls": [USER, CALL, RESULT, ANSWER, USER, *SECOND, USER],
    "empty result": [USER, CALL, result(""), USER],
}
USABLE = [each.stem for each in TEMPLATES.glob("*.jinja") if not each.stem.startswith(UNUSABLE)]
PLACES = ("messages[", "tools are not shown", "fails: ")


def words_of(text):
    return set(re.findall("[A-Za-z0-9]+", text))


def render(chat, messages, tools):
    """Return the text of a prompt, and the error where there is none."""
    try:
        return chat.tokenizer.decode(chat.prompt(messages, tools)), ""
    except TemplateError as error:
        return "", str(error)


def count_shown(chats, quirk, tools):
    """Check a quirk with chat templates by name; return the number of templates that show it."""
    messages, num_shown = QUIRKS[quirk], 0
    texts = json.dumps([[each.get("content"), each.get("tool_calls")] for each in messages])
    wanted = {word for word in words_of(texts) if word.isupper()} | ({"Add"} if tools else set())
    for name, chat in chats:
        text, error = render(chat, messages, tools)
        assert bool(text) != bool(error)
        if error:
            assert error.startswith(f"{name} ") or "messages[" in error, error
            assert any(place in error for place in PLACES), error
            continue
        num_shown += 1
        assert not [word for word in wanted if word not in text], name
        assert "None" not in text, name
    return num_shown
