"""
Tasks from files: JSONL, a JSON list, Parquet or CSV, in turnwise's own row form or in verl's as it is.

A row needs `messages`, or `prompt` (a list of messages, or a text that becomes one user message). These columns are
understood. `Task.extra` keeps every other column, and `reward_model` and `extra_info`:

- `uid`, a text or an integer; derived from the content when the row has none.
- `sample_index`, which each row of a file has or none, and no two share; or verl's ``extra_info.index``, which rows of
  joined data sets share; the row's number when neither is an integer from 0.
- `ground_truth`, or verl's ``reward_model.ground_truth``, SkyRL's ``reward_spec.ground_truth``, or `solution`, as data
  sets for TRL call it.
- `agent_name` and `data_source`.

Nothing is ever unpickled: a Parquet column must be made of plain types. Dates, times and decimals become text.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, evolve, field

from turnwise.errors import DataError, first_line
from turnwise.options import DataColumn
from turnwise.types import JsonDict, Task
from turnwise_strict_json import MalformedError, find_mistake, load_json
from turnwise_task_files.messages import kind_of, take_messages

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: Final[Mapping[str, str]] = {".csv": "csv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
"""Format by file suffix."""

_BATCH_ROWS: Final = 1024
_UID_CHARACTERS: Final = 16
_Located = tuple[str, object]
"""The place of a row, for error texts, and the row."""


def read_tasks(
    path: str | Path,
    *,
    format: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    columns: Mapping[DataColumn, str | None] | None = None,
) -> list[Task]:
    """
    Read the tasks of a file.

    Args:
        path: a file whose suffix is one of `FORMATS`.
        format: `csv`, `jsonl`, `json` or `parquet`; None goes by the suffix.
        offset: number of tasks to skip at the start, after shuffling.
        limit: most tasks to return; None returns all. Unless shuffled, rows after the last one are not read.
        shuffle_seed: shuffle all tasks by this seed first; None keeps the order of the file.
        columns: the file's names of understood columns, such as ``{"prompt": "question"}``; None ignores a column.

    Returns:
        At least one task; their `uid` differ. A derived `uid` is a hash of the row's messages and index, the same
        wherever the file lies and whichever format it has, and holds neither "_" nor "/".

    Raises:
        DataError: the file cannot be read, or a row of it is no task; the text names the file and the row.
    """
    file = Path(path)
    if offset < 0:
        raise DataError(f"{file}: 'offset' must be at least 0, not {offset}")
    if limit is not None and limit < 1:
        raise DataError(f"{file}: 'limit' must be at least 1, not {limit}")
    stop = None if limit is None else min(offset + limit, sys.maxsize)
    tasks = list(islice(_tasks(file, format, columns or {}), stop if shuffle_seed is None else None))
    if not tasks:
        raise DataError(f"{file}: holds no rows")
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(tasks)
    if offset >= len(tasks):
        raise DataError(f"{file}: 'offset' {offset} is past its {len(tasks)} rows")
    return tasks[offset:stop]


def task_from_row(row: Mapping[str, object], *, row_number: int = 0, where: str = "row") -> Task:
    """Make a task of a row, whose values numpy or pyarrow may have made; `DataError` starts with `where`."""
    values = _plain_row(row, where)
    messages = take_messages(values, where)
    for name in ("reward_model", "reward_spec", "extra_info"):
        if values.get(name) is not None:
            values[name] = _object(values[name], f"{where}: {name}")
    index = _take_index(values, row_number, where)
    truth = values.pop("ground_truth", None)
    for name in ("reward_model", "reward_spec"):  # of verl and of SkyRL
        if truth is None and isinstance(values.get(name), Mapping):
            truth = values[name].get("ground_truth")
    truth = values.get("solution") if truth is None else truth
    return Task(
        messages=messages,
        uid=_own_uid(values.pop("uid", None), where) or _content_hash([messages, index]),
        sample_index=index if isinstance(index, int) and 0 <= index < 2**63 else row_number,
        agent_name=_text(values.pop("agent_name", None), f"{where}: agent_name"),
        ground_truth=truth,
        data_source=_text(values.pop("data_source", None), f"{where}: data_source"),
        extra=values,
    )


def _tasks(file: Path, format: str | None, columns: Mapping[DataColumn, str | None]) -> Iterator[Task]:
    renamed = {name: column for name, column in columns.items() if column is not None}
    first_seen: dict[str, str] = {}
    indexes = _Indexes()
    repeats: Counter[str] = Counter()
    for number, (where, row) in enumerate(_rows(file, format)):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object, got {kind_of(row)}")
        if missing := sorted(set(renamed.values()) - set(row)):
            raise DataError(f"{where}: has no column {missing[0]!r}; its columns are {', '.join(row)}")
        others = {name: value for name, value in row.items() if name not in {*columns, *renamed.values()}}
        row = others | {name: row[column] for name, column in renamed.items()}
        task = task_from_row(row, row_number=number, where=where)
        indexes.add(None if row.get("sample_index") is None else task.sample_index, where)
        if row.get("uid") is None:
            # Some data sets repeat a row with its index on purpose: each copy is a separate task.
            repeats[task.uid] += 1
            if repeats[task.uid] > 1:
                task = evolve(task, uid=f"{task.uid}-{repeats[task.uid]}")
        if task.uid in first_seen:
            raise DataError(f"{where}: uid {task.uid!r} is also the uid of {first_seen[task.uid]}")
        first_seen[task.uid] = where
        yield task


@define
class _Indexes:
    """The rows' own `sample_index`: a file gives each row a different one, or none to any row."""

    first_row: str | None = None
    rows: dict[int, str] = field(factory=dict)

    def add(self, index: int | None, where: str) -> None:
        """Add the index of a row; `DataError` if the file's rows cannot be told apart by their indexes."""
        if self.first_row is not None and (index is None) == bool(self.rows):
            has, lacks = (where, self.first_row) if index is not None else (self.first_row, where)
            raise DataError(f"{lacks}: has no sample_index, but {has} has one; give one to every row or to none")
        self.first_row = self.first_row or where
        if index is None:
            return
        if index in self.rows:
            raise DataError(f"{where}: sample_index {index} is also the sample_index of {self.rows[index]}")
        self.rows[index] = where


# Files


def _rows(file: Path, format: str | None) -> Iterator[_Located]:
    name = FORMATS.get(file.suffix.lower(), "") if format is None else format
    if name not in _READERS:
        wrong, known = (f"suffix {file.suffix!r}", FORMATS) if format is None else (f"format {format!r}", _READERS)
        raise DataError(f"{file}: {wrong} is none of {', '.join(known)}")
    try:
        if not file.exists():
            raise DataError(f"{file}: no such file")
        if not file.is_file():  # to read a pipe could wait for ever
            raise DataError(f"{file}: is {'a directory' if file.is_dir() else 'a pipe or a device'}, not a file")
        yield from _READERS[name](file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {first_line(error)}") from error


def _jsonl_rows(file: Path) -> Iterator[_Located]:
    start = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = _decoded(line, file, number, start)
            start += len(line)
            if text.strip():
                yield f"{file}, line {number}", _json(text, file, number)


def _json_rows(file: Path) -> Iterator[_Located]:
    rows = _json(_decoded(file.read_bytes(), file, 1, 0), file, 1)
    if not isinstance(rows, list):
        raise DataError(f"{file}: expected a list of objects, got {kind_of(rows)}")
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", row


def _csv_rows(file: Path) -> Iterator[_Located]:
    reader = csv.DictReader(io.StringIO(_decoded(file.read_bytes(), file, 1, 0), newline=""), strict=True)
    try:
        _refuse_repeated(reader.fieldnames or (), file)
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            # The reader puts cells beyond the columns under None, and gives None to columns beyond the cells.
            if None in row or None in row.values():
                few_or_many = "more" if None in row else "fewer"
                raise DataError(f"{where}: has {few_or_many} cells than the first line, which names the columns")
            index = row.get("sample_index") or ""
            numbers = {"sample_index": int(index)} if index.isdecimal() and len(index) < 100 else {}
            yield where, {name: cell or None for name, cell in row.items()} | numbers
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.reader.line_num}: invalid CSV: {error}") from error


def _parquet_rows(file: Path) -> Iterator[_Located]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as parquet:
            _refuse_repeated(parquet.schema_arrow.names, file)
            for column in parquet.schema_arrow:
                _refuse_unplain(column, file)
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"{file}, row {number}", row
                    number += 1
    except (pa.ArrowException, ValueError, OverflowError) as error:  # the last one for dates beyond the year 9999
        raise DataError(f"{file}: not a readable Parquet file: {first_line(error)}") from error


_READERS: Final[Mapping[str, Callable[[Path], Iterator[_Located]]]] = {
    "csv": _csv_rows,
    "jsonl": _jsonl_rows,
    "json": _json_rows,
    "parquet": _parquet_rows,
}


def _decoded(data: bytes, file: Path, line: int, start: int) -> str:
    """Return the text of some lines of a file, the first being `line`, at byte `start`; a BOM is dropped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(f"{file}, line {line}: not UTF-8 at byte {start + error.start} of the file") from None
    return text.removeprefix("\ufeff") if start == 0 else text


def _json(text: str, file: Path, line: int) -> object:
    text = text.rstrip()  # without the line break at its end, behind which a text that is cut off would be wrong
    try:
        return load_json(text)
    except MalformedError as error:
        at = find_mistake(text, error)
        num_breaks, last_break = text.count("\n", 0, at), text.rfind("\n", 0, at)
        place = f"{file}, line {line + num_breaks}: invalid JSON"
        column = "" if error.position is None else f" at column {at - last_break}"
        raise DataError(f"{place}{column}: {error.problem}") from None


def _refuse_repeated(columns: Sequence[str], file: Path) -> None:
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise DataError(f"{file}: two columns are called {twice!r}")


def _refuse_unplain(column: pa.Field, file: Path) -> None:
    wrong = _unplain(column)
    if wrong is not None:
        read = "only text, numbers, booleans, times, lists and structs are read"
        raise DataError(f"{file}: column {column.name!r} has type {wrong}; {read}")


def _unplain(field: pa.Field) -> str | None:
    """Return the first type in a column that is not plain, if any."""
    import pyarrow as pa

    type_ = field.type
    name = (field.metadata or {}).get(b"ARROW:extension:name")
    if name is not None or isinstance(type_, pa.BaseExtensionType):
        return f"extension<{name.decode(errors='replace')}>" if name else str(type_).partition("\n")[0]
    if pa.types.is_dictionary(type_):
        return _unplain(pa.field(field.name, type_.value_type))
    if pa.types.is_struct(type_):
        return next(filter(None, (_unplain(type_.field(i)) for i in range(type_.num_fields))), None)
    if any(test(type_) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return _unplain(type_.value_field)
    plain = ("null", "boolean", "integer", "floating", "string", "large_string", "string_view", "temporal", "decimal")
    return None if any(getattr(pa.types, f"is_{name}")(type_) for name in plain) else str(type_)


# Values


def _plain_row(row: Mapping[str, object], where: str) -> dict[str, Any]:
    try:
        return {_encodable(str(name), where): _plain(value, f"{where}: {name}") for name, value in row.items()}
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None


def _plain(value: object, where: str) -> object:
    """Return a value as JSON would hold it: None, bool, int, float, str, list or dict."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    elif hasattr(value, "as_py"):
        value = value.as_py()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return _encodable(value, where)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, Mapping):
        return {_encodable(str(name), where): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise DataError(f"{where}: {value if isinstance(value, float) else kind_of(value)} is no JSON value")


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: the text holds half of a surrogate pair, which is no character") from None
    return text


def _object(value: object, where: str) -> JsonDict:
    """Return a struct that may have been written as JSON text."""
    if isinstance(value, str):
        try:
            value = _plain(load_json(value), where)
        except (MalformedError, RecursionError) as error:
            raise DataError(f"{where}: not a JSON object: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {kind_of(value)}")
    return value


def _text(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a text, got {kind_of(value)}")
    return value


def _own_uid(value: object, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: uid: expected a text that is not empty, got {value!r:.60}")
    return str(value)


def _take_index(values: dict[str, Any], row_number: int, where: str) -> object:
    """Return the index that distinguishes equal rows: `sample_index`, ``extra_info.index`` or the row number."""
    own = _as_integer(values.pop("sample_index", None))
    if own is not None:
        if isinstance(own, bool) or not isinstance(own, int) or not 0 <= own < 2**63:
            raise DataError(f"{where}: sample_index: expected an integer from 0 to 2**63 - 1, got {own!r:.60}")
        return own
    given = _as_integer((values.get("extra_info") or {}).get("index"))
    return row_number if given is None or isinstance(given, bool) else given


def _as_integer(value: object) -> object:
    """Return the integer of a whole float: pandas turns a column of integers with gaps into floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _content_hash(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_UID_CHARACTERS]
