"""
Reads JSON values strictly.

`json` is lenient in ways that would hide a mistake of the model or fail later: duplicate keys, numbers that JSON lacks,
lone surrogates and excessive nesting are errors here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

SPACE: Final = re.compile(r"\s*")


class MalformedError(ValueError):
    """A call is malformed; the text tells the model why."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """
    Read the JSON value that starts at `start`.

    Returns:
        value: the JSON value.
        stop: index after the value.

    Raises:
        MalformedError: there is no JSON value; positions in the error count from `start`.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise MalformedError(f"it is not valid JSON: {reason} at character {error.pos - start}") from error
    except RecursionError as error:
        raise MalformedError("its JSON is nested too deeply") from error
    except MalformedError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedError(f"it is not valid JSON: {error}") from error


def load_json(text: str) -> Any:
    """Return the value of a text that is JSON and nothing else; `MalformedError` for any other text."""
    start = _skip_space(text, 0)
    value, stop = read_json(text, start)
    if _skip_space(text, stop) != len(text):
        raise MalformedError("there is text after its JSON")
    return value


def check_value(value: Any, raw: str, max_depth: int) -> None:
    """Refuse a value, written as `raw`, that is nested too deeply or has half a surrogate pair: `MalformedError`."""
    # Both checks walk the whole value, so each runs only if the text can fail it.
    if raw.count("[") + raw.count("{") + raw.count("(") > max_depth and _is_deeper(value, max_depth):
        raise MalformedError(f"its values are nested more than {max_depth} levels deep")
    if "\\" in raw and _has_lone_surrogate(value):
        raise MalformedError("it holds half of a surrogate pair, which is no character")


def _skip_space(text: str, start: int) -> int:
    match = SPACE.match(text, start)
    return match.end() if match else start


def _is_deeper(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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


def parse_float(text: str) -> float:
    """Return a number that has a fraction or an exponent; `MalformedError` when no float can hold it."""
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError(f"the number {text} is too large")
    return number


def _reject_constant(name: str) -> float:
    raise MalformedError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=parse_float, parse_constant=_reject_constant
)
