"""
Quirks of messages that people have, and what a prompt makes of them.

A prompt shows each text of its messages, in the given form or in an equal one, or it is refused with the place of a
message, the tools, or the template's own words. `outcome_of` checks that, and returns which of them it is.
"""

import json
import re
from collections import Counter

import jinja2
from real_templates import TEMPLATES, special_tokens_of

from turnwise.errors import TemplateError
from turnwise_chat_templates.template import ChatTemplate

PARTS_ONLY = ("llava", "idefics", "smolvlm")
"""Beginnings of the names of templates that show no content that is a text, and get its parts."""
ON_PAGE = sorted(each.stem for each in TEMPLATES.glob("*.jinja") if not each.stem.startswith(PARTS_ONLY))
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}},
    },
}
USER = {"role": "user", "content": "USERTEXT"}
SPELLED = "{special tokens}"
"""Stands for the special tokens of a template."""


def calling(arguments='{"a": "ZEBRA"}', *, ids=("call00001",), **keys):
    """Return an assistant message with calls."""
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids],
    } | keys


def result(content="OUTCOME", call_id="call00001"):
    return {"role": "tool", "tool_call_id": call_id, "name": "add", "content": content}


def parts(role, **keys):
    texts = [{"type": "text", "text": text} for text in ("PART1", "PART2")]
    return {"role": role, "content": texts} | keys


ANSWER = {"role": "assistant", "content": "ANSWER"}
SYSTEM = {"role": "system", "content": "RULE1"}
DEVELOPER = {"role": "developer", "content": "RULE2"}
CALL, RESULT = calling(content=""), result()
SECOND = [calling(content="", ids=("call00002",)), result("RESULT2", "call00002")]
UNICODE = "GR\u00dc\u00dfE \u4e16\u754c \U0001f30d"
QUIRKS = {
    "user": [USER],
    "developer first": [DEVELOPER, USER],
    "developer later": [USER, ANSWER, DEVELOPER, USER],
    "system": [SYSTEM, USER],
    "two systems": [SYSTEM, {"role": "system", "content": "RULE2"}, USER],
    "system and developer": [SYSTEM, DEVELOPER, USER],
    "system between turns": [USER, ANSWER, SYSTEM, USER],
    "system last": [USER, SYSTEM],
    "system, content empty": [{"role": "system", "content": ""}, USER],
    "system alone": [SYSTEM],
    "two users": [USER, {"role": "user", "content": "AGAIN"}],
    "answer first": [ANSWER, USER],
    "answer last": [USER, ANSWER],
    "two answers": [USER, ANSWER, {"role": "assistant", "content": "MORE"}, USER],
    "user, content null": [{"role": "user", "content": None}],
    "answer, content absent": [USER, {"role": "assistant"}, USER],
    "answer, content null": [USER, {"role": "assistant", "content": None}, USER],
    "answer, `tool_calls` empty": [USER, ANSWER | {"tool_calls": []}, USER],
    "answer, `tool_calls` null": [USER, ANSWER | {"tool_calls": None}, USER],
    "system of parts": [parts("system"), USER],
    "user of parts": [parts("user")],
    "result of parts": [USER, CALL, result() | parts("tool"), USER],
    "call, content empty": [USER, CALL, RESULT, USER],
    "call, content null": [USER, calling(content=None), RESULT, USER],
    "call, content absent": [USER, calling(), RESULT, USER],
    "call, content a text": [USER, calling(content="THINKING"), RESULT, USER],
    "arguments: object": [USER, calling({"a": "ZEBRA"}, content=""), RESULT, USER],
    "arguments: empty text": [USER, calling("", content=""), RESULT, USER],
    "arguments: null": [USER, calling(None, content=""), RESULT, USER],
    "arguments: cut JSON": [USER, calling('{"a": "ZEBRA', content=""), RESULT, USER],
    "arguments: list": [USER, calling('["ZEBRA"]', content=""), RESULT, USER],
    "arguments: JSON in JSON": [USER, calling(json.dumps('{"a": "ZEBRA"}'), content=""), RESULT, USER],
    "two calls": [USER, calling(content="", ids=("call00001", "call00002")), RESULT, SECOND[1], USER],
    "one result of two": [USER, calling(content="", ids=("call00001", "call00002")), RESULT, USER],
    "results swapped": [USER, calling(content="", ids=("call00001", "call00002")), SECOND[1], RESULT, USER],
    "result without a call": [USER, RESULT, USER],
    "result first": [RESULT, USER],
    "result of an unknown call": [USER, CALL, result(call_id="call00009"), USER],
    "result last": [USER, CALL, RESULT],
    "call last": [USER, CALL],
    "two turns of calls": [USER, CALL, RESULT, ANSWER, USER, *SECOND, USER],
    "result, content empty": [USER, CALL, result(""), USER],
    "unicode": [{"role": "user", "content": UNICODE}],
    "unicode in a call": [
        USER,
        calling(json.dumps({"a": UNICODE}, ensure_ascii=False), content=""),
        result(UNICODE),
        USER,
    ],
    "special tokens": [{"role": "user", "content": SPELLED}],
    "special tokens in a call": [USER, calling(json.dumps({"a": SPELLED}), content=""), RESULT, USER],
    "special tokens in a result": [USER, CALL, result(SPELLED), USER],
}
SHOWN, NO_TOOLS = "=", "W"
FORMS = {
    "a": "arguments that are null or an empty text become an empty object",
    "c": "the key `tool_calls` is left out where it has no call",
    "e": "a content that is null or absent becomes an empty text",
    "j": "arguments become JSON text",
    "n": "an absent content becomes null",
    "o": "arguments in JSON text become an object",
    "p": "the texts of the parts become one text",
    "s": "the role `developer` becomes `system`",
}
"""The equal forms, by letter."""
REFUSALS = {
    "A": "arguments are no JSON object, and the template fails",
    "F": "the template fails on messages of this form",
    "H": "the template would hide a text: a message, a call or the content beside a call",
    "N": "the template would show the word None for an empty content",
    "T": "the template refuses the messages in its own words",
    NO_TOOLS: "the template does not show tools",
}
"""Reasons of refusals, by letter."""
PLACES = {"N": "word None", "W": "tools are not shown", "H": "is not shown", "A": "the arguments are no JSON object"}


def spelling(value, text):
    """Return a JSON value with a text in the place of `SPELLED`, escaped in texts of JSON."""
    if isinstance(value, str):
        return text if value == SPELLED else value.replace(SPELLED, json.dumps(text, ensure_ascii=False)[1:-1])
    if isinstance(value, dict):
        return {key: spelling(item, text) for key, item in value.items()}
    return [spelling(item, text) for item in value] if isinstance(value, list) else value


def texts_of(messages):
    """Return the texts that a prompt must show, as often as they are in the messages."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            texts += re.findall("ZEBRA", str(arguments)) or values_of(arguments)
    return Counter(text for text in texts if text)


def values_of(arguments):
    return json.loads(arguments).values() if arguments else ()


def forms_between(given, shown):
    """Return the letters of the forms in which messages are shown; another difference is an error."""
    found = set()
    for before, after in zip(given, shown, strict=True):
        role, content, calls = before["role"], before.get("content"), before.get("tool_calls") or ()
        if role == "developer" != after["role"]:
            role = "system"
            found.add("s")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
            found.add("p")
        if content is None and after["content"] is not None:
            content = ""
            found.add("e")
        elif "content" not in before:
            found.add("n")
        if "tool_calls" in before and not calls:
            found.add("c")
        assert (role, content) == (after["role"], after["content"])
        for call, other in zip(calls, after.get("tool_calls", ()), strict=True):
            found |= forms_of_call(call, other)
        assert others_of(before) == others_of(after)
    return found


def others_of(message):
    return {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}


def forms_of_call(call, shown):
    """Return the letters of the forms of a call."""
    given, other = call["function"]["arguments"], shown["function"]["arguments"]
    assert shown == {**call, "function": {"name": call["function"]["name"], "arguments": other}}
    found = set()
    if not given:
        given = {}
        found.add("a")
    if isinstance(given, str) and isinstance(other, dict):
        given = json.loads(given)
        found.add("o")
    elif isinstance(given, dict) and isinstance(other, str):
        other = json.loads(other)
        found.add("j")
    assert given == other
    return found


def refusal_of(name, error):
    """Return the letter of an error, which must name the template or a message."""
    text = str(error)
    assert text.startswith(f"{name} ") or "messages[" in text, text
    for letter, place in PLACES.items():
        if place in text:
            return letter
    assert text.startswith(f"{name} fails: "), text
    return "T" if type(error.__cause__) is jinja2.TemplateError else "F"


def num_special(chat, ids):
    return sum(chat.tokenizer.decode([token_id]) in chat.tokenizer.special_tokens for token_id in ids.tolist())


def outcome_of(name: str, chat: ChatTemplate, quirk: str, tools) -> str:
    """
    Return `SHOWN`, the letters of the equal forms, or the letter of a refusal.

    It fails if a text of the messages is not in the prompt, if the prompt has the word None, or if a special token that
    a content spells is one in the prompt.
    """
    spelled = special_tokens_of(name)
    messages = spelling(QUIRKS[quirk], spelled)
    try:
        ids = chat.prompt(messages, tools)
    except TemplateError as error:
        return refusal_of(name, error)
    text = chat.tokenizer.decode(ids)
    # A text may be inside of JSON, and vocabularies out of sentencepiece have one id for the space and its sign.
    plain = text.replace('\\"', '"').replace("▁", " ")
    for wanted, number in texts_of(messages).items():
        assert plain.count(wanted.replace("▁", " ")) >= number, (name, wanted, text)
    assert not tools or "Add" in text, name
    assert "None" not in text, name
    if messages != QUIRKS[quirk]:
        harmless = chat.prompt(spelling(QUIRKS[quirk], "Q" * len(spelled)), tools)
        assert num_special(chat, harmless) == num_special(chat, ids), name
    return "".join(sorted(forms_between(messages, chat.shown_messages(messages, tools)))) or SHOWN
