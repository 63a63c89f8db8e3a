"""
Files of rows of plain types: layout, writing and reading of Parquet and JSON lines.

A writer fills a temporary file in complete pieces, so the temporary file is readable after a kill at any time.
`turnwise_result_files.episode_rows` converts rows to episodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turnwise.errors import DataError
from turnwise.files import PARTIAL, partial_path, replace
from turnwise_result_files.row_checks import check_file, check_row, check_schema, parse_json, to_array
from turnwise_result_files.row_schema import ADDED, ARRAYS, JSON, SCHEMA, TRAINING_SCHEMA, Row

_BATCH_ROWS: Final = 256
_GROUP_ROWS: Final = 4096
_GROUP_BYTES: Final = 16 * 2**20
"""Largest group of a Parquet file, before compression; a larger batch is a group by itself."""
_BATCH_BYTES: Final = 256 * 2**20
"""Largest batch of a stream, before compression; a larger episode is a batch by itself."""
_MAX_DEPTH: Final = 100
"""Levels of a JSON value, well below the depth at which Python's reader gives up."""
_MAX_BITS: Final = 4096
"""Longest integer written as a number; Python refuses to read decimals of some thousand digits."""


class ParquetFile:
    """
    A Parquet file with large groups of rows.

    Parquet cannot be read before its last byte is written, so rows go to a stream of Arrow batches first, which can,
    and are copied when all are there. A batch has the few rows of a second; groups are joined from many.
    """

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        self._path = path
        self._schema = schema
        self._partial = partial_path(path)
        self._file = self._partial.open("wb")
        self._stream = pa.ipc.new_stream(self._file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    @staticmethod
    def encode(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
        """Return rows as `write` takes them; a value that does not fit its column raises."""
        return _to_table(rows, schema)

    def write(self, pieces: Sequence[pa.Table]) -> None:
        """Add encoded rows; they are on their way to the disk when it returns."""
        refuse_removed(self._file, self._path)
        # An array of Arrow takes 2 GiB of text, and an episode is whole in one batch: a reader of a killed run takes
        # the batches that it finds for all of its rows.
        episodes = (batch for piece in pieces for batch in piece.combine_chunks().to_batches())
        for group in join_batches(episodes, _BATCH_BYTES):
            self._stream.write_table(group.combine_chunks())
        self._file.flush()

    def close(self) -> None:
        """Write the Parquet file and give it its name; when that fails, the partial file stays and is readable."""
        refuse_removed(self._file, self._path)
        self._stream.close()
        self._file.close()
        complete = self._path.with_name(f"{self._path.name}.complete")
        try:
            with complete.open("wb") as file, pq.ParquetWriter(file, self._schema, compression="zstd") as writer:
                for group in join_batches(_stream_batches(self._partial)):
                    writer.write_table(group, row_group_size=group.num_rows)
            replace(complete, self._path)
        except BaseException:
            complete.unlink(missing_ok=True)
            raise
        self._partial.unlink()


def join_batches(batches: Iterable[pa.RecordBatch], max_bytes: int | None = None) -> Iterator[pa.Table]:
    """
    Yield the rows of batches as tables for groups of a Parquet file: few groups, each small enough to read for one row.

    A table of several batches has at most `max_bytes`; None takes the bound of a group.
    A reader of some columns of a large file pays for each group, and a reader of one episode pays for a whole group.
    """
    limit = _GROUP_BYTES if max_bytes is None else max_bytes
    pending: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        if pending and (num_rows + batch.num_rows > _GROUP_ROWS or num_bytes + batch.nbytes > limit):
            yield pa.Table.from_batches(pending)
            pending, num_rows, num_bytes = [], 0, 0
        pending.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


class JsonlFile:
    """A file in which each row is a line, and nothing is JSON within JSON."""

    def __init__(self, path: Path, _schema: pa.Schema = SCHEMA) -> None:
        self._path = path
        self._file: BinaryIO = partial_path(path).open("wb")

    @staticmethod
    def encode(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> bytes:
        """Return rows as `write` takes them; a value that does not fit its column raises."""
        _to_table(rows, schema)
        return b"".join(_json(row).encode() + b"\n" for row in rows)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Add encoded rows; they are on their way to the disk when it returns."""
        refuse_removed(self._file, self._path)
        self._file.writelines(pieces)
        self._file.flush()

    def close(self) -> None:
        """Give the file its name."""
        self._file.close()
        replace(partial_path(self._path), self._path)


class RemovedFileError(DataError, OSError):
    """A file was removed while it was written."""


def refuse_removed(file: BinaryIO, path: Path) -> None:
    """Raise `RemovedFileError` when an open file has no name any more: all that is written to it would be lost."""
    if not os.fstat(file.fileno()).st_nlink:
        raise RemovedFileError(f"{path}: its file was removed while the run wrote to it")


RowFile = ParquetFile | JsonlFile
SUFFIXES: Final[Mapping[str, type[ParquetFile] | type[JsonlFile]]] = {".parquet": ParquetFile, ".jsonl": JsonlFile}


def read_rows(file: Path) -> Iterator[Row]:
    """
    Yield the rows of a file. Of a file whose writer was killed, yield the rows that it had written whole.

    Raises:
        DataError: the suffix is of no known format.
        ValueError: another version wrote the file; Arrow and JSON raise their own errors.
    """
    check_file(file)
    partial = file.suffix == PARTIAL
    suffix = file.with_suffix("").suffix if partial else file.suffix
    if suffix not in SUFFIXES:
        raise DataError(f"{file}: suffix {suffix!r} is none of {', '.join(SUFFIXES)}")
    if suffix == ".jsonl":
        return _jsonl_rows(file, partial=partial)
    return _batch_rows(_stream_batches(file) if partial else _parquet_batches(file))


def find_rows(folder: Path, stem: str) -> Path:
    """Return the file with the rows of a folder: the complete one, else the partial one; `DataError` if none."""
    names = [f"{stem}{suffix}" for suffix in SUFFIXES]
    for ending in ("", PARTIAL):
        found = [folder / f"{name}{ending}" for name in names if (folder / f"{name}{ending}").exists()]
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise DataError(f"{folder}: holds {'both' if found else 'neither of'} {' and '.join(names)}")


def _to_table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([row | {name: _json_column(name, row[name]) for name in JSON} for row in rows], schema)


def _json_column(name: str, value: object) -> str:
    text = _json(value)
    parse_json(name, text)  # no writer writes what no reader reads
    return text


def _json(value: object) -> str:
    value = to_json(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or plain_text(text) == text else json.dumps(value)


def to_json(value: object, parents: tuple[int, ...] = ()) -> object:
    """Return a value as JSON has it. Plugins may return anything, and nothing that they return may fail here."""
    if value is None or isinstance(value, str | float | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else hex(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist() if value.dtype.kind in "biuf" else to_json(value.tolist(), parents)
    if not isinstance(value, Mapping | list | tuple):
        return _text(value)
    if id(value) in parents or len(parents) == _MAX_DEPTH:
        return f"<{type(value).__name__} that contains itself, or is nested too deeply>"
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        return {_text(key): to_json(each, parents) for key, each in value.items()}
    return [to_json(each, parents) for each in value]


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a plugin's `__str__` may raise anything
        return f"<{type(value).__name__}>"


def plain_text(value: object) -> str:
    """Return a text that can be written as UTF-8: half a surrogate pair becomes its escape."""
    return _text(value).encode("utf-8", "backslashreplace").decode()


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with file.open("rb") as stream:
        parquet = pq.ParquetFile(stream)
        check_schema(parquet.schema_arrow)
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS)


def _stream_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the complete batches; a killed writer may have left an incomplete one behind them."""
    with file.open("rb") as stream:
        try:
            reader = pa.ipc.open_stream(stream)
        except pa.ArrowInvalid:  # killed before the first byte
            return
        check_schema(reader.schema)
        while True:
            try:
                batch = reader.read_next_batch()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return
            yield batch


def _batch_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    for batch in batches:
        # Token columns stay arrays: as Python lists they would take ten times the time and memory.
        of_tokens = [name for name in (*ARRAYS, "advantages") if name in batch.schema.names]
        plain = batch.select([name for name in batch.schema.names if name not in of_tokens]).to_pylist()
        for index, row in enumerate(plain):
            arrays = {name: batch.column(name)[index].values for name in of_tokens}
            texts = {name: parse_json(name, row[name]) for name in JSON}
            whole = dict.fromkeys(ADDED) | row | texts | {name: to_array(name, each) for name, each in arrays.items()}
            check_row(whole)
            yield whole


def _jsonl_rows(file: Path, *, partial: bool) -> Iterator[Row]:
    with file.open("rb") as stream:
        for line in stream:
            if partial and not line.endswith(b"\n"):
                return
            yield from _batch_rows(iter(lines_to_table([line]).to_batches()))


def lines_to_table(lines: Iterable[bytes]) -> pa.Table:
    """Return lines of JSON as a table of the columns that the first of them has."""
    rows = [parse_row(line) for line in lines]
    schema = TRAINING_SCHEMA if rows and "training_step" in rows[0] else SCHEMA
    missing = [name for name in schema.names if name not in ADDED and any(name not in row for row in rows)]
    if missing:
        raise ValueError(f"has no column {missing[0]!r}")
    return _to_table(rows, schema)


def parse_row(line: bytes) -> Row:
    """Return the object of a line."""
    row: object = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a line is no JSON object")  # noqa: TRY004 - of a file, not of an argument
    return row
