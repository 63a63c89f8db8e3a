"""Calls to other models than the policy as a person reads them: the messages of the request, and the answer as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from turnwise.record.outside_call import OutsideCall
from turnwise.types import JsonDict, Message
from turnwise_result_files.messages import text_of

_EVENT: Final = "data:"
"""Start of a line with an event of a stream."""


def read_messages(call: OutsideCall) -> list[Message]:
    """
    Return the messages of a request of Chat Completions, Messages or Responses, each with a text as `content`.

    A request of another form, or one that was shortened, is one message of the user with the whole text.
    """
    body = _parse(call.request)
    given = body.get("messages", body.get("input"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        return [{"role": "user", "content": call.request}]
    first = body.get("system", body.get("instructions"))
    messages: list[JsonDict] = [*([{"role": "system", "content": first}] if first else []), *given]
    return [{"role": str(each.get("role", each.get("type", "user"))), "content": _read_text(each)} for each in messages]


def read_answer(call: OutsideCall) -> str:
    """Return the text of a response, also of a stream; a response without any, such as an error, is returned whole."""
    whole = _parse(call.response)
    if whole:
        return _read_whole(whole) or call.response
    events = (line.removeprefix(_EVENT) for line in call.response.splitlines() if line.startswith(_EVENT))
    return "".join(map(_read_delta, map(_parse, events))) or call.response


def _parse(text: str) -> JsonDict:
    """Return the JSON object of a text; an empty one when it is none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_text(message: JsonDict) -> str:
    """Return the text of a message; one without any, such as a call or its result, is shown as JSON."""
    return text_of({"content": ""} | message) or json.dumps(message, ensure_ascii=False)


def _read_whole(body: JsonDict) -> str:
    """Return the text of a response: of a choice, of blocks, or of the items of `output`."""
    parts = [choice.get("message") for choice in _objects(body.get("choices"))]
    parts += [{"content": body.get("content")}, *_objects(body.get("output"))]
    return "".join(text_of({"content": ""} | part) for part in parts if isinstance(part, dict))


def _read_delta(event: JsonDict) -> str:
    """Return the text that an event of a stream adds."""
    deltas = [choice.get("delta") for choice in _objects(event.get("choices"))] or [event.get("delta")]
    return "".join(map(_text_of_delta, deltas))


def _text_of_delta(delta: object) -> str:
    if isinstance(delta, Mapping):
        delta = delta.get("content", delta.get("text"))
    return delta if isinstance(delta, str) else ""


def _objects(value: object) -> Iterable[JsonDict]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
