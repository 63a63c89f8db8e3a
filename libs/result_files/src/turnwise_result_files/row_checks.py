"""
Checks of files of episodes, which every reader makes: names and types of the columns, and the values of a row.

`turnwise.record.invariants` checks the tokens of a record once it is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turnwise.errors import DataError
from turnwise.types import Array
from turnwise_result_files.row_schema import (
    ADDED,
    ARRAYS,
    ATTEMPT,
    COUNTS,
    FAULT,
    SCHEMA,
    SECONDS,
    TRAINING_SCHEMA,
    VERSION,
    Row,
)

_REQUIRED: Final = (
    *("uid", "agent_name", "data_source", "status", "task_agent_name", "objective", *ATTEMPT),
    *("sample_index", "rollout_n", "global_step", "validation"),
    *(*COUNTS, *SECONDS, "mask_ratio", "tool_reward"),
)
"""Columns that are never null."""
_OF_RECORDS: Final = (*ARRAYS, "segments")
"""Columns that are null exactly in the row of an episode without a record."""
_FROM_0: Final = (
    *("rollout_n", "global_step", "trajectory_index", "training_step"),
    *("num_turns", "num_tool_calls", "num_tool_errors"),
)
"""Numbers that count from 0. An engine reports the number of cached tokens, and a data set the index of a row."""
_IDS_FROM_0: Final = ("prompt_ids", "response_ids", "position_ids", "block_start", "path_start")


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(type(each) in (int, float) for each in value.values())


_JSON_KINDS: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "messages": ("a list of objects", _is_objects),
    "task_messages": ("a list of objects", _is_objects),
    "task_extra": ("an object", lambda value: isinstance(value, dict)),
    "score_extra": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "num_tokens": ("an object of numbers", _is_numbers),
    "metrics_extra": ("an object of numbers", _is_numbers),
    "reports.facts": ("an object", lambda value: isinstance(value, dict)),
}
"""Values of the columns of JSON; `ground_truth` may be any."""


def check_schema(schema: pa.Schema) -> None:
    """
    Check the columns of a file; it may have more than the known ones.

    Raises:
        ValueError: another version wrote it, or a column is missing or has another type; the text names the column.
    """
    version = (schema.metadata or {}).get(b"turnwise_schema", str(VERSION).encode()).decode("utf-8", "replace")
    if version not in map(str, range(1, VERSION + 1)):
        reads = f"this turnwise reads versions 1 to {VERSION}"
        raise ValueError(f"its columns are of another version: {version} in the file, but {reads}")
    is_training = "training_step" in schema.names or "advantages" in schema.names
    for field in TRAINING_SCHEMA if is_training else SCHEMA:
        at = schema.get_all_field_indices(field.name)
        if not at and ADDED.get(field.name, 1) > int(version):
            continue
        if len(at) != 1:
            raise ValueError(f"has {'more than one' if at else 'no'} column {field.name!r}")
        if schema.field(at[0]).type != field.type:
            raise ValueError(f"column {field.name!r} has type {schema.field(at[0]).type}, expected {field.type}")


def parse_json(name: str, text: object) -> object:
    """Return the value of a column of JSON; `ValueError` when it is no JSON, or of another kind than the column has."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except RecursionError:
        raise ValueError(f"column {name!r} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"column {name!r} is no JSON: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"column {name!r} is null")  # noqa: TRY004 - of a file, not of an argument
    expected, fits = _JSON_KINDS.get(name, ("", lambda _value: True))
    if not fits(value):
        raise ValueError(f"column {name!r} is not {expected}")
    return value


def to_array(name: str, values: pa.Array | None) -> Array | None:
    """Return the values of a token column; `ValueError` when one of them is null."""
    if values is None:
        return None
    if values.null_count:
        raise ValueError(f"column {name!r} has a null")
    array: Array = values.to_numpy()
    return array


def check_table(table: pa.Table) -> None:
    """Check the values of some columns of many rows as far as `check_row` checks single values."""
    for name in table.column_names:
        if name in _REQUIRED and table[name].null_count:
            raise ValueError(f"column {name!r} is null")
        if name in _FROM_0 and (pc.min(table[name]).as_py() or 0) < 0:
            raise ValueError(f"column {name!r} is {pc.min(table[name])}, expected at least 0")


def check_file(file: Path) -> None:
    """Refuse a pipe or a device, from which a reader would wait for ever; `DataError` names the file."""
    if file.exists() and not file.is_file():
        raise DataError(f"{file}: is no regular file")


def check_row(row: Row) -> None:
    """
    Check the values of a row that do not depend on other rows.

    Raises:
        ValueError: a value is null or out of its range, or lengths differ; the text names the column.
    """
    for name in _REQUIRED:
        if row[name] is None:
            raise ValueError(f"column {name!r} is null")
    for name in _FROM_0:
        if (row.get(name) or 0) < 0:
            raise ValueError(f"column {name!r} is {row[name]}, expected at least 0")
    _check_end(row)
    values = row["score_values"]
    is_single = row["score_level"] == "trajectory"
    if row["score_level"] is not None and (values is None or None in values or (is_single and len(values) != 1)):
        raise ValueError(f"column 'score_values' is {values}, expected {'a number' if is_single else 'numbers'}")
    has_record = row["trajectory_index"] is not None
    for name in _OF_RECORDS:
        if (row[name] is not None) != has_record:
            raise ValueError(f"column {name!r} is {'null' if has_record else 'set'}, but trajectory_index is not")
    if has_record:
        _check_tokens(row)


def _check_end(row: Row) -> None:
    if row["fault_owner"] is not None and any(row[f"fault_{name}"] is None for name in FAULT):
        raise ValueError("a column of the fault is null")
    if row.get("limit_name") is not None and row.get("limit_reason") is None:
        raise ValueError("column 'limit_reason' is null")


def _check_tokens(row: Row) -> None:
    for name in _IDS_FROM_0:
        if np.min(row[name], initial=0) < 0:
            raise ValueError(f"column {name!r} has {int(np.min(row[name]))}, expected numbers from 0")
    num_response = len(row["response_ids"])
    lengths: Sequence[tuple[str, int]] = [
        *((name, num_response) for name in ("response_mask", "logprobs", "weight_versions")),
        *((name, len(row["prompt_ids"]) + num_response) for name in ("position_ids", "block_start", "path_start")),
    ]
    if row.get("advantages") is not None:
        lengths = [*lengths, ("advantages", num_response)]
    for name, length in lengths:
        if len(row[name]) != length:
            raise ValueError(f"column {name!r} has {len(row[name])} values, expected {length}")
    actions = [(each["start"], each["stop"]) for each in row["segments"] if each["origin"] == "action"]
    mask = np.zeros(num_response, np.uint8)
    for start, stop in actions:
        mask[start - len(row["prompt_ids"]) : stop - len(row["prompt_ids"])] = 1
    if not np.array_equal(mask, row["response_mask"]):
        raise ValueError("column 'response_mask' is not 1 exactly on the segments of actions")


def fill_columns(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return some columns of a table; a column that a later version added is null."""
    for name in names:
        if name in ADDED and name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, SCHEMA.field(name).type))
    return table.select(list(names))
