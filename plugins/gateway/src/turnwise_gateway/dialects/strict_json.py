"""
JSON of requests and responses, as strict in both directions and in all dialects.

A body that two readers could understand differently is refused: duplicate keys, NaN and infinite numbers, bytes that
are not UTF-8, and halves of surrogate pairs, which no tokenizer can read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Final

from turnwise_gateway.calls import CallRefusedError

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_DEPTH: Final = 100
"""Deepest nesting: far more than any tool's schema has, and too little for any reader's stack."""
_TOO_DEEP: Final = "it is nested too deeply"


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; `CallRefusedError` of kind `invalid` says why it is none."""
    try:
        text = body.decode("utf-8")
        value = DECODER.decode(text)
        check_depth(value)
        check_surrogates(text, value)
    except UnicodeDecodeError as error:
        raise _invalid("it is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise _invalid("a string has half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise _invalid(_TOO_DEEP) from error
    if not isinstance(value, dict):
        raise _invalid("it is not an object")
    return value


def write_json(value: object) -> bytes:
    """Return JSON in ASCII; `ValueError` if a number is NaN or infinite."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a tool call's arguments, or None for any text that is not one in strict JSON."""
    try:
        return read_json(text.encode("utf-8"))
    except (CallRefusedError, UnicodeEncodeError):
        return None


def _invalid(reason: str) -> CallRefusedError:
    return CallRefusedError("invalid", f"the body is not valid JSON: {reason}")


def check_depth(value: object, num_around: int = 0) -> None:
    """Raise `ValueError` if a value inside `num_around` others is nested too deeply."""
    if not isinstance(value, dict | list):
        return
    # One level at a time, and so without recursion.
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH - num_around):
        level = [inner for outer in level for inner in _inner_values(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def check_surrogates(text: str, value: object) -> None:
    """Raise `UnicodeEncodeError` if a value that was read from a text has half of a surrogate pair."""
    # An escape is the only way to half a pair, so texts without one are not searched.
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")


def _inner_values(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _collect_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_collect_pairs, parse_float=_read_float, parse_constant=_refuse_constant
)
