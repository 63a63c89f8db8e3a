"""
The arguments of a malformed call as an object, because the dialect Messages has no other form.

A stream may have sent a part of them before the mistake, and clients fail at a stream of an object that is no JSON. So
the object that was begun gets an end. Its values become null, for half of a text must not pass for the argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from turnwise.types import JsonDict
from turnwise_strict_json import read_arguments

MALFORMED: Final = "INVALID_JSON"
"""Key that this API's documentation recommends for arguments that are no JSON."""
_TAILS: Final = ("", '"', "null", ": null", '": null', '"": null')
"""Ends of a value or of a key that a text may need."""
_CLOSING: Final = {"{": "}", "[": "]"}


def write_input(arguments: str) -> JsonDict:
    """Return the arguments of a call as an object; malformed ones as the only value of an object."""
    values = read_arguments(arguments)
    return {MALFORMED: arguments} if values is None else values


def write_input_delta(arguments: str, rest: str) -> str:
    """Return the JSON that a stream of arguments needs at its end, after all but the rest of them was sent."""
    if read_arguments(arguments) is not None:
        return rest
    sent = arguments[: len(arguments) - len(rest)]
    if not sent.strip():
        return json.dumps({MALFORMED: arguments})
    inner = _list_open_brackets(sent)[:0:-1]
    for tail in _TAILS:
        end = tail + "".join(_CLOSING[bracket] for bracket in inner)
        if (values := _read_object(sent + end + "}")) is not None:
            added = json.dumps({**dict.fromkeys(values), MALFORMED: arguments})
            return f"{end}{', ' if values else ''}{added[1:]}"
    return rest  # what was sent is no JSON either


def find_malformed(values: Mapping[str, object]) -> str | None:
    """Return the malformed arguments that an object has; None for other objects."""
    malformed = values.get(MALFORMED)
    others = (value for key, value in values.items() if key != MALFORMED)
    return malformed if isinstance(malformed, str) and all(value is None for value in others) else None


def _list_open_brackets(text: str) -> list[str]:
    found: list[str] = []
    in_string = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped, in_string = char == "\\", char != '"'
        elif char == '"':
            in_string = True
        elif char in "{[":
            found.append(char)
        elif char in "}]" and found:
            found.pop()
    return found


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
