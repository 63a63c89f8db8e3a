"""
Builds a `ToolCall` from the JSON of one call. A malformed call becomes a `ToolCall` with an error for the model.

The module is stricter than `json`, whose leniency would hide mistakes of the model or cause failures later: it rejects
duplicate keys, numbers outside JSON, lone surrogates and excessive nesting.
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
    """A call is malformed; the text tells the model why."""


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character at or after `start` that is not white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def read_json(text: str, start: int) -> tuple[Any, int]:
    """
    Read the JSON value that starts at `start` or after white space.

    Returns:
        value: the JSON value.
        stop: index after the value.

    Raises:
        MalformedError: there is no JSON value; positions in the text count from `start`.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise MalformedError(f"it is not valid JSON: {reason} at character {error.pos - start}") from error
    except RecursionError as error:
        raise MalformedError("its JSON is nested too deeply") from error
    except MalformedError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedError(f"it is not valid JSON: {error}") from error


def build_call(value: Any, raw: str, max_depth: int) -> ToolCall:
    """Build a call, or a malformed call, from the JSON value of the text `raw`."""
    name = value.get("name") if isinstance(value, dict) else None
    try:
        if not isinstance(value, dict):
            raise MalformedError(f"expected a JSON object, got {_KINDS[type(value)]}")  # noqa: TRY301 - caught below, for the model
        _check_value(value, raw, max_depth)
        return ToolCall(name=_read_name(value), arguments=_read_arguments(value, max_depth), raw=raw)
    except MalformedError as error:
        return malformed_call(str(error), raw, name if isinstance(name, str) else "")


def malformed_call(why: str, raw: str, name: str = "") -> ToolCall:
    """Return a call that cannot run, with an error that tells the model how to write one."""
    form = 'Write {"name": "<tool>", "arguments": {...}} between the tags of a tool call.'
    return ToolCall(name=name, error=f"Error: this tool call is malformed: {why}. {form}", raw=raw)


def _read_name(value: dict[str, Any]) -> str:
    if "name" not in value:
        raise MalformedError('the key "name" is missing')
    name = value["name"]
    if not isinstance(name, str):
        raise MalformedError(f'"name" must be a string, got {_KINDS[type(name)]}')
    if not name.strip():
        raise MalformedError('"name" is empty')
    return name


def _read_arguments(value: dict[str, Any], max_depth: int) -> dict[str, Any]:
    if "arguments" not in value:
        # Other keys are arguments that the model put in the wrong place, so only a name alone means "no arguments".
        if value.keys() - {"name"}:
            raise MalformedError('the key "arguments" is missing')
        return {}
    arguments = value["arguments"]
    if isinstance(arguments, str):
        arguments = _decode_arguments(arguments, max_depth)
    if not isinstance(arguments, dict):
        raise MalformedError(f'"arguments" must be a JSON object, got {_KINDS[type(arguments)]}')
    return arguments


def _decode_arguments(text: str, max_depth: int) -> Any:
    """Decode arguments in a JSON string, as in the OpenAI format."""
    try:
        value, stop = read_json(text, 0)
        if skip_space(text, stop) != len(text):
            raise MalformedError("there is text after its JSON")  # noqa: TRY301 - the key is added below
        _check_value(value, text, max_depth)
    except MalformedError as error:
        raise MalformedError(f'"arguments" is a string, and {error}') from error
    return value


def _check_value(value: Any, raw: str, max_depth: int) -> None:
    # Both checks walk the whole value, so each runs only if the text can fail it.
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


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedError(f"the key {json.dumps(duplicate)} is given twice")
    return value


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError(f"the number {text} is too large")
    return number


def _reject_constant(name: str) -> float:
    raise MalformedError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=_parse_float, parse_constant=_reject_constant
)
