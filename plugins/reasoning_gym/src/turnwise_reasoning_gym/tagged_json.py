"""
Python values as JSON, without loss: tuples stay tuples, and keys of other types stay keys.

The scores of some data sets compare tuples, or look up numbers, so plain JSON would score a right answer as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

_TUPLE: Final = "$tuple"
_PAIRS: Final = "$pairs"
_TAGS: Final = (_TUPLE, _PAIRS)


def to_tagged(value: object) -> Any:
    """Return JSON of a value; `TypeError` for an object that has no form here."""
    if hasattr(value, "item") and not isinstance(value, str | list | tuple | Mapping):
        value = value.item()  # of numpy
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        pairs = [[to_tagged(key), to_tagged(item)] for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and not value.keys() & {*_TAGS}:
            return dict(pairs)
        return {_PAIRS: pairs}
    if isinstance(value, tuple):
        return {_TUPLE: [to_tagged(item) for item in value]}
    if isinstance(value, list):
        return [to_tagged(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def from_tagged(value: object) -> Any:
    """Return the value that `to_tagged` got; a subclass, such as a text of numpy, becomes its base class."""
    if isinstance(value, list):
        return [from_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(from_tagged(item) for item in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {from_tagged(key): from_tagged(item) for key, item in value[_PAIRS]}
    return {key: from_tagged(item) for key, item in value.items()}
