"""
Reads one call: the JSON between the tags becomes a `ToolCall`, or a `ToolCall` that says what is wrong with it.

Stricter than `json` where its leniency would hide a mistake of the model or hurt later: keys given twice, numbers that
JSON does not have, lone surrogates and bottomless nesting are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from turnwise import ToolCall

_SPACE: Final = re.compile(r"\s*")
_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class MalformedError(ValueError):
    """A call cannot be read; the text says why, for the model."""


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def read_json(text: str, start: int) -> tuple[Any, int]:
    """
    Read the JSON value that begins at `start`, white space aside.

    Returns:
        value: the JSON value.
        stop: index after it.

    Raises:
        MalformedError: there is none; positions in its text count from `start`.
    """
    begin = skip_space(text, start)
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise MalformedError(f"it is not valid JSON: {what} at character {error.pos - start}") from error
    except RecursionError as error:
        raise MalformedError("its JSON is nested too deeply") from error
    except MalformedError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedError(f"it is not valid JSON: {error}") from error


def to_call(value: Any, raw: str, max_depth: int) -> ToolCall:
    """Make a call of a JSON value that was read from `raw`."""
    name = value.get("name") if isinstance(value, dict) else None
    try:
        if not isinstance(value, dict):
            raise MalformedError(f"expected a JSON object, got {_KINDS[type(value)]}")  # noqa: TRY301 - told to the model
        _refuse_odd(value, raw, max_depth)
        return ToolCall(name=_name(value), arguments=_arguments(value, max_depth), raw=raw)
    except MalformedError as error:
        return malformed(str(error), raw, name if isinstance(name, str) else "")


def malformed(why: str, raw: str, name: str = "") -> ToolCall:
    """Return a call that cannot be run, with a text that tells the model how to write it."""
    form = 'Write {"name": "<tool>", "arguments": {...}} between the tags of a tool call.'
    return ToolCall(name=name, error=f"Error: this tool call is malformed: {why}. {form}", raw=raw)


def _name(value: dict[str, Any]) -> str:
    if "name" not in value:
        raise MalformedError('the key "name" is missing')
    name = value["name"]
    if not isinstance(name, str):
        raise MalformedError(f'"name" must be a string, got {_KINDS[type(name)]}')
    if not name.strip():
        raise MalformedError('"name" is empty')
    return name


def _arguments(value: dict[str, Any], max_depth: int) -> dict[str, Any]:
    if "arguments" not in value:
        # Only a call that names nothing else means "no arguments"; other keys are arguments in the wrong place.
        if value.keys() - {"name"}:
            raise MalformedError('the key "arguments" is missing')
        return {}
    arguments = value["arguments"]
    if isinstance(arguments, str):
        arguments = _decoded(arguments, max_depth)
    if not isinstance(arguments, dict):
        raise MalformedError(f'"arguments" must be a JSON object, got {_KINDS[type(arguments)]}')
    return arguments


def _decoded(text: str, max_depth: int) -> Any:
    """Decode arguments that were written as a JSON string, as the OpenAI form has them."""
    try:
        value, stop = read_json(text, 0)
        if skip_space(text, stop) != len(text):
            raise MalformedError("there is text after its JSON")  # noqa: TRY301 - named with the key below
        _refuse_odd(value, text, max_depth)
    except MalformedError as error:
        raise MalformedError(f'"arguments" is a string, and {error}') from error
    return value


def _refuse_odd(value: Any, raw: str, max_depth: int) -> None:
    # Both checks walk the value, so they are made only where the text leaves them possible.
    if raw.count("[") + raw.count("{") > max_depth and _deeper_than(value, max_depth):
        raise MalformedError(f"its JSON is nested more than {max_depth} levels deep")
    if "\\u" in raw and _has_lone_surrogate(value):
        raise MalformedError("it holds half of a surrogate pair, which is no character")


def _deeper_than(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedError(f"the key {json.dumps(twice)} is given twice")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError(f"the number {text} is too large")
    return number


def _no_constant(name: str) -> float:
    raise MalformedError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
