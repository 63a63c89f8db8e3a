"""JSON of requests and responses, as strict in both directions and in all dialects."""

from __future__ import annotations

import json
from typing import Any, Final

from turnwise_gateway.calls import CallRefusedError
from turnwise_strict_json import MAX_DEPTH, MalformedError, check_value, load_json

_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` makes a new one for each call that has options."""


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; `CallRefusedError` of kind `invalid` says why it is none."""
    try:
        text = body.decode("utf-8")
        value = load_json(text)
        check_value(value, text, MAX_DEPTH)
    except UnicodeDecodeError as error:
        raise _invalid("it is not UTF-8") from error
    except MalformedError as error:
        raise _invalid(str(error)) from error
    if not isinstance(value, dict):
        raise _invalid("it is not an object")
    return value


def write_json(value: object) -> bytes:
    """Return JSON in ASCII; `ValueError` if a number is NaN or infinite."""
    return _ENCODER.encode(value).encode("ascii")


def _invalid(reason: str) -> CallRefusedError:
    return CallRefusedError("invalid", f"the body is malformed: {reason}")
