"""JSON text of the API and of exported pages."""

from __future__ import annotations

import json
import math


def encode(value: object) -> bytes:
    """Return JSON in ASCII: half a surrogate pair in a model's text has no other form. Infinities and nan are null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: object) -> object:
    """Return a value with null for numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
