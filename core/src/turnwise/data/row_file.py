"""
Files of rows of plain types: layout, writing and reading of Parquet and JSON lines.

A writer fills a temporary file in complete pieces, so the temporary file is readable after a kill at any time.
`turnwise.data.trajectories` converts rows to episodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import fields as attributes_of

from turnwise.errors import DataError
from turnwise.files import PARTIAL, partial_path, replace
from turnwise.types import Fault

_SEGMENT: Final = pa.struct(
    [("origin", pa.string()), *((name, pa.int32()) for name in ("start", "stop", "block", "path"))]
)
_IDS: Final = pa.list_(pa.int32())
ARRAYS: Final[Mapping[str, pa.DataType]] = {
    "prompt_ids": _IDS,
    "response_ids": _IDS,
    "response_mask": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "weight_versions": _IDS,
    "position_ids": _IDS,
    "block_start": _IDS,
    "path_start": _IDS,
}
COUNTS: Final = ("num_turns", "num_tool_calls", "num_tool_errors", "num_cached_tokens")
SECONDS: Final = ("total_s", "llm_s", "tool_s", "reward_s")
FAULT: Final = tuple(attribute.name for attribute in attributes_of(Fault))
JSON: Final = ("messages", "ground_truth", "task_messages", "task_extra", "score_extra", "num_tokens", "metrics_extra")
_BATCH_ROWS: Final = 256

SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("uid", "agent_name", "data_source", "status", "task_agent_name")),
        *((name, pa.int64()) for name in ("sample_index", "rollout_n", "global_step", "trajectory_index")),
        ("validation", pa.bool_()),
        ("objective", pa.string()),
        *((f"fault_{name}", pa.string()) for name in FAULT),
        *ARRAYS.items(),
        ("segments", pa.list_(_SEGMENT)),
        *((name, pa.string()) for name in ("prompt_text", "response_text", "score_level", "score_at")),
        ("reward", pa.float64()),
        ("score_values", pa.list_(pa.float64())),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in (*SECONDS, "mask_ratio", "tool_reward")),
        *((name, pa.string()) for name in JSON),
    ]
)
"""
Columns of `trajectories.parquet`. Every row repeats the columns of its episode; `reward` belongs to the row.

`trajectory_index` is null for an episode without a trajectory, whose other columns are kept. These columns hold JSON
text: messages, ground_truth, task_messages, task_extra, score_extra, num_tokens, metrics_extra.
"""

Row = dict[str, Any]
"""A row by column; `SCHEMA` gives the types."""


class ParquetFile:
    """
    A Parquet file with a row group per write.

    Parquet cannot be read before its last byte is written, so rows go to a stream of Arrow batches first, which can,
    and are copied when all are there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = partial_path(path)
        self._file = self._partial.open("wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows; they are on their way to the disk when it returns."""
        texts = [row | {name: _json(row[name]) for name in JSON} for row in rows]
        self._stream.write_table(pa.Table.from_pylist(texts, SCHEMA))
        self._file.flush()

    def close(self) -> None:
        """Write the Parquet file and give it its name."""
        self._stream.close()
        self._file.close()
        complete = self._path.with_name(f"{self._path.name}.complete")
        with complete.open("wb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
            for batch in _stream_batches(self._partial):
                writer.write_batch(batch)
        replace(complete, self._path)
        self._partial.unlink()


class JsonlFile:
    """A file in which each row is a line, and nothing is JSON within JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = partial_path(path).open("wb")

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows; they are on their way to the disk when it returns."""
        self._file.writelines(_json(row).encode() + b"\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Give the file its name."""
        self._file.close()
        replace(partial_path(self._path), self._path)


RowFile = ParquetFile | JsonlFile
SUFFIXES: Final[Mapping[str, type[ParquetFile] | type[JsonlFile]]] = {".parquet": ParquetFile, ".jsonl": JsonlFile}


def read_rows(file: Path) -> Iterator[Row]:
    """
    Yield the rows of a file. Of a file whose writer was killed, yield the rows that it had written whole.

    Raises:
        DataError: the suffix is of no known format.
        ValueError: another version wrote the file; Arrow and JSON raise their own errors.
    """
    partial = file.suffix == PARTIAL
    suffix = file.with_suffix("").suffix if partial else file.suffix
    if suffix not in SUFFIXES:
        raise DataError(f"{file}: suffix {suffix!r} is none of {', '.join(SUFFIXES)}")
    if suffix == ".jsonl":
        return _jsonl_rows(file, partial=partial)
    return _batch_rows(_stream_batches(file) if partial else _parquet_batches(file))


def find_rows(folder: Path, stem: str) -> Path:
    """
    Return the file with the rows of a folder: the complete one, else the partial one of a killed writer.

    Raises:
        DataError: there is none, or more than one.
    """
    names = [f"{stem}{suffix}" for suffix in SUFFIXES]
    for ending in ("", PARTIAL):
        found = [folder / f"{name}{ending}" for name in names if (folder / f"{name}{ending}").exists()]
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise DataError(f"{folder}: holds {'both' if found else 'neither of'} {' and '.join(names)}")


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text if text.isascii() or plain_text(text) == text else json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def plain_text(value: str) -> str:
    """Return a text that can be written as UTF-8: half a surrogate pair becomes its escape."""
    return value.encode("utf-8", "backslashreplace").decode()


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with file.open("rb") as stream:
        parquet = pq.ParquetFile(stream)
        if not parquet.schema_arrow.equals(SCHEMA):
            raise ValueError("another version of turnwise wrote the file: its columns differ")
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS)


def _stream_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the complete batches; a killed writer may have left an incomplete one behind them."""
    with file.open("rb") as stream:
        try:
            reader = pa.ipc.open_stream(stream)
        except pa.ArrowInvalid:  # killed before the first byte
            return
        if not reader.schema.equals(SCHEMA):
            raise ValueError("another version of turnwise wrote the file: its columns differ")
        while True:
            try:
                batch = reader.read_next_batch()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return
            yield batch


def _batch_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    for batch in batches:
        # Token columns stay arrays: as Python lists they would take ten times the time and memory.
        plain = batch.select([name for name in SCHEMA.names if name not in ARRAYS]).to_pylist()
        for index, row in enumerate(plain):
            arrays = {name: batch.column(name)[index].values for name in ARRAYS}
            texts = {name: json.loads(row[name]) for name in JSON}
            yield row | texts | {k: v if v is None else v.to_numpy() for k, v in arrays.items()}


def _jsonl_rows(file: Path, *, partial: bool) -> Iterator[Row]:
    with file.open("rb") as stream:
        for line in stream:
            if partial and not line.endswith(b"\n"):
                return
            yield json.loads(line)
