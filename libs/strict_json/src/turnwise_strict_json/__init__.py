"""
Reads the JSON that models, agents and people write, strictly.

A text that two readers could understand differently is an error: duplicate keys, `NaN`, infinite numbers, excessive
nesting, and halves of surrogate pairs, which no tokenizer can read.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

__all__ = [
    "MAX_DEPTH",
    "MalformedError",
    "check_depth",
    "check_surrogates",
    "check_value",
    "find_mistake",
    "load_json",
    "read_arguments",
    "read_float",
    "read_json",
]

MAX_DEPTH: Final = 100
"""Deepest nesting of `read_arguments`: far more than any tool's schema has, and too little for any reader's stack."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_MAX_SHOWN: Final = 40
"""Characters of a number in an error: grammars of JSON allow numbers of any length."""
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedError(ValueError):
    """
    A text is malformed; the error's text names the mistake.

    Attributes:
        problem: the mistake, without its place.
        position: index of the mistake in the text, or None if the reader did not see it.
    """

    def __init__(self, text: str, problem: str | None = None, position: int | None = None) -> None:
        super().__init__(text)
        self.problem = text if problem is None else problem
        self.position = position


def read_json(text: str, start: int, *, nonfinite: bool = False) -> tuple[Any, int]:
    """
    Read the JSON value that starts at `start` or after white space; nesting and surrogates are not checked.

    Args:
        text: holds the value.
        start: index at which to begin.
        nonfinite: read `NaN`, `Infinity` and numbers that no float can hold, as Python's own `json` does.

    Returns:
        value: the JSON value.
        stop: index after the value.

    Raises:
        MalformedError: there is no JSON value; positions in the error count from `start`.
    """
    try:
        return (_decode_nonfinite if nonfinite else _decode)(text, _skip_space(text, start))
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        text = f"it is not valid JSON: {reason} at character {error.pos - start}"
        raise MalformedError(text, reason, error.pos) from error
    except RecursionError as error:
        raise MalformedError("its JSON is nested too deeply") from error
    except MalformedError:
        raise
    except ValueError as error:  # Python's own text is advice to the programmer
        reason = f"an integer has more than {sys.get_int_max_str_digits()} digits"
        raise MalformedError(f"it is not valid JSON: {reason}", reason) from error


def load_json(text: str, *, nonfinite: bool = False) -> Any:
    """
    Return the value of a text that is JSON and nothing else; `MalformedError` for any other text.

    With `nonfinite`, numbers may be `NaN`, infinite or too large for a float; see `read_json`.
    """
    start = _skip_space(text, 0)
    value, stop = read_json(text, start, nonfinite=nonfinite)
    end = _skip_space(text, stop)
    if end != len(text):
        raise MalformedError("there is text after its JSON", position=end)
    return value


def find_mistake(text: str, error: MalformedError) -> int:
    """
    Return the index of the mistake for which `load_json` refused a text.

    The scanner in C does not say in which object a key is given twice or a number is refused. The one in Python, which
    is slower and runs only here, does: the index is that of the innermost object's opening bracket, or of the start of
    the text if no object has the mistake.
    """
    if error.position is not None:
        return error.position
    starts: list[int] = []
    parts: Any = json  # whose types say nothing of the scanner

    def parse_object(text_and_start: tuple[str, int], *rest: object) -> Any:
        try:
            return parts.decoder.JSONObject(text_and_start, *rest)
        except MalformedError:
            starts.append(text_and_start[1] - 1)
            raise

    decoder = parts.JSONDecoder(
        object_pairs_hook=_build_object, parse_float=read_float, parse_constant=_refuse_constant
    )
    decoder.parse_object = parse_object
    decoder.scan_once = parts.scanner.py_make_scanner(decoder)
    with suppress(ValueError, RecursionError):
        decoder.raw_decode(text, _skip_space(text, 0))
    return starts[0] if starts else 0


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a tool call's arguments, or None for any text that is not one in strict JSON."""
    try:
        value = load_json(text)
        check_value(value, text, MAX_DEPTH)
        text.encode()
    except (MalformedError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


def check_value(value: object, text: str, max_depth: int) -> None:
    """Refuse a value, read from `text`, that is nested too deeply or has half a surrogate pair: `MalformedError`."""
    check_depth(value, max_depth, text)
    check_surrogates(value, text)


def check_depth(value: object, max_depth: int, text: str, start: int = 0, stop: int | None = None) -> None:
    """Refuse a value, written as `text[start:stop]`, that is nested more than `max_depth` levels: `MalformedError`."""
    # A value cannot be deeper than its text has brackets, and to count them is cheaper than to walk the value.
    num_brackets = text.count("[", start, stop) + text.count("{", start, stop) + text.count("(", start, stop)
    if num_brackets > max_depth and _is_deeper(value, max_depth):
        raise MalformedError(f"its values are nested more than {max_depth} levels deep")


def check_surrogates(value: object, text: str) -> None:
    """Refuse a value, read from `text`, that has half of a surrogate pair from an escape: `MalformedError`."""
    if _SURROGATE.search(text) is None:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise MalformedError("it holds half of a surrogate pair, which is no character") from error


def read_float(text: str) -> float:
    """
    Return a number that has a fraction or an exponent; `MalformedError` when no float can hold it.

    JSON allows any exponent. As a float the number would be infinite, which is another number and no JSON, and as an
    integer it may have more digits than a computer can hold.
    """
    number = float(text)
    if not math.isfinite(number):
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        raise MalformedError(f"the number {shown} is too large")
    return number


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _is_deeper(value: object, max_depth: int) -> bool:
    # One level at a time, and so without recursion.
    level = [value]
    for _ in range(max_depth):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedError(f"the key {json.dumps(duplicate)} is given twice")
    return value


def _refuse_constant(name: str) -> float:
    raise MalformedError(f"{name} is not JSON")


_decode = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=read_float, parse_constant=_refuse_constant
).raw_decode
_decode_nonfinite = json.JSONDecoder(object_pairs_hook=_build_object).raw_decode
