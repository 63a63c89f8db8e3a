"""Rows of JSONL, JSON, Parquet and CSV files, with their places for error texts."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnwise.errors import DataError, first_line
from turnwise_strict_json import MalformedError, find_mistake, load_json
from turnwise_task_files.messages import kind_of

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: Final[Mapping[str, str]] = {".csv": "csv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
"""Format by file suffix."""

_BATCH_ROWS: Final = 1024
Located = tuple[str, object]
"""The place of a row, for error texts, and the row."""


def read_rows(file: Path, format: str | None) -> Iterator[Located]:
    """Yield the rows of a file in its format, or in that of its suffix; `DataError` names what cannot be read."""
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


def _jsonl_rows(file: Path) -> Iterator[Located]:
    start = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = _decoded(line, file, number, start)
            start += len(line)
            if text.strip():
                yield f"{file}, line {number}", _json(text, file, number)


def _json_rows(file: Path) -> Iterator[Located]:
    rows = _json(_decoded(file.read_bytes(), file, 1, 0), file, 1)
    if not isinstance(rows, list):
        raise DataError(f"{file}: expected a list of objects, got {kind_of(rows)}")
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", row


def _csv_rows(file: Path) -> Iterator[Located]:
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


def _parquet_rows(file: Path) -> Iterator[Located]:
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


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Located]]]] = {
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
        return load_json(text, nonfinite=True)  # which column may lack a number is decided by whoever reads the row
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
