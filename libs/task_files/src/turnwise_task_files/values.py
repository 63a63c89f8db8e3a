"""Values of rows as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal

import numpy as np

from turnwise.errors import DataError, first_line
from turnwise.types import JsonDict
from turnwise_strict_json import MalformedError, load_json
from turnwise_task_files.messages import kind_of


def plain(value: object, where: str, holes: list[str] | None = None) -> object:
    """
    Return a value as JSON would hold it: None, bool, int, float, str, list or dict.

    Args:
        value: of a row, which numpy or pyarrow may have made.
        where: its place, for errors.
        holes: gets the places of numbers that are NaN or infinite, which become None; None refuses them.
    """
    if type(value) is str:  # most values, and asking whether numpy or pyarrow made it takes longer than the rest
        return encodable(value, where)
    return _plain_other(value, where, holes)


def _plain_other(value: object, where: str, holes: list[str] | None) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    elif hasattr(value, "as_py"):
        value = value.as_py()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return encodable(value, where)
    if isinstance(value, float):
        return _finite(value, where, holes)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, Mapping):
        return {encodable(str(name), where): plain(item, f"{where}.{name}", holes) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]", holes) for index, item in enumerate(value)]
    raise DataError(f"{where}: {kind_of(value)} is no JSON value")


def _finite(value: float, where: str, holes: list[str] | None) -> float | None:
    if math.isfinite(value):
        return value
    if holes is None:
        raise DataError(f"{where}: {value} is no JSON value")
    holes.append(where)
    return None


def encodable(text: str, where: str) -> str:
    """Return a text that UTF-8 can encode; `DataError` for any other."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: the text holds half of a surrogate pair, which is no character") from None
    return text


def without_nulls(value: object) -> object:
    """Return a value whose objects have no keys that hold None, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_object(value: object, where: str) -> JsonDict:
    """Return a struct that may have been written as JSON text."""
    if isinstance(value, str):
        try:
            value = plain(load_json(value), where)
        except (MalformedError, RecursionError) as error:
            raise DataError(f"{where}: not a JSON object: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {kind_of(value)}")
    return value


def as_text(value: object, where: str) -> str:
    """Return a text, which is empty for None; `DataError` for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a text, got {kind_of(value)}")
    return value


def as_integer(value: object) -> object:
    """Return the integer of a whole float: pandas turns a column of integers with gaps into floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
