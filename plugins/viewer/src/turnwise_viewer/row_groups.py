"""
Random access to the rows of an episode file, by group of rows and by column.

A complete run has a Parquet file. A run that is in progress, or that was killed, has a stream of Arrow batches, and
some runs have JSON lines. All three are read in pieces, so that no reader holds a whole file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from turnwise.errors import DataError, describe
from turnwise.files import PARTIAL
from turnwise_result_files.row_checks import check_file, check_schema, fill_columns
from turnwise_result_files.row_file import lines_to_table
from turnwise_result_files.row_schema import SCHEMA, TRAINING, TRAINING_SCHEMA
from turnwise_result_files.trajectories import UNREADABLE

_LINES_PER_GROUP: Final = 64
_COUNTED: Final = "validation"
"""A column that is quick to decode, for the number of rows of a batch."""


class RowGroups(Protocol):
    """The groups of rows of a file. `sizes` has the number of rows of each; it grows while a run is in progress."""

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def is_training(self) -> bool:
        """Whether the rows have the columns of a training step."""

    @property
    def problem(self) -> str | None:
        """Files that are left out because they cannot be read; None if there are none."""

    def refresh(self) -> None:
        """Find the groups that were written since the last call."""

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Return some columns of some groups, in the order of the groups."""

    def close(self) -> None:
        """Close the file."""


def open_groups(file: Path) -> RowGroups:
    """
    Open an episode file.

    Raises:
        DataError: the file cannot be read, or another version of turnwise wrote it.
    """
    check_file(file)
    is_partial = file.suffix == PARTIAL
    is_jsonl = (file.with_suffix("") if is_partial else file).suffix == ".jsonl"
    try:
        if is_jsonl:
            return _JsonlGroups(file)
        return _StreamGroups(file) if is_partial else _ParquetGroups(file)
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        raise DataError(f"{file}: cannot be read as episodes: {error}") from error


def open_steps(folder: Path) -> RowGroups:
    """Open the episodes of a training, a file for each step; raises as `open_groups`."""
    groups = _StepGroups(folder)
    try:
        groups.refresh()
    except BaseException:
        groups.close()
        raise
    return groups


def list_steps(folder: Path) -> list[Path]:
    """
    Return the files of a training's steps and validations, in the order in which a training writes them.

    The held-out episodes of a step come after the episodes that the step learned from.
    """
    files = [*folder.glob("step-*.parquet"), *folder.glob("validation-*.parquet")]
    return sorted(files, key=lambda file: (file.stem.rpartition("-")[2], file.name))


class _StepGroups:
    """The groups of steps and validations one after another; a file is written at once, so it does not grow."""

    is_training = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, RowGroups] = {}
        self._places: list[tuple[Path, int]] = []
        self.sizes: list[int] = []
        self.problem: str | None = None

    def refresh(self) -> None:
        problems = []
        for file in list_steps(self._folder):
            if file not in self._files:
                try:
                    groups = self._files[file] = _open_step(file)
                except DataError as error:
                    problems.append(str(error).replace(f"{self._folder.parent}/", ""))
                    continue
                self._places += [(file, index) for index in range(len(groups.sizes))]
                self.sizes += groups.sizes
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        self.problem = f"{problems[0]}{more}" if problems else None

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        tables = []
        for file, places in groupby((self._places[group] for group in groups), key=itemgetter(0)):
            try:
                tables.append(_read_as_step(self._files[file], [index for _file, index in places], columns))
            except UNREADABLE as error:
                raise DataError(f"{file}: cannot be read as episodes: {describe(error)}") from error
        schema = pa.schema([TRAINING_SCHEMA.field(name) for name in columns])
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def close(self) -> None:
        for groups in self._files.values():
            groups.close()


def _open_step(file: Path) -> RowGroups:
    groups = open_groups(file)
    if not groups.is_training and not _is_held_out(file):
        groups.close()
        raise DataError(f"{file}: has no column 'training_step', so it is no step of a training")
    return groups


def _is_held_out(file: Path) -> bool:
    return file.name.startswith("validation-")


def _read_as_step(file: RowGroups, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Read rows with the columns of a training; no step learned from held-out episodes, so they have no advantages."""
    if file.is_training:
        return file.read(groups, columns)
    table = file.read(groups, [*dict.fromkeys([*(name for name in columns if name in SCHEMA.names), "global_step"])])
    added = {
        "training_step": table["global_step"],
        "advantages": pa.nulls(table.num_rows, TRAINING_SCHEMA.field("advantages").type),
    }
    for name in TRAINING:
        table = table.append_column(TRAINING_SCHEMA.field(name), added[name])
    return table.select(list(columns))


class _ParquetGroups:
    problem = None

    def __init__(self, file: Path) -> None:
        # Not mapped: pages of a mapped file stay with the process as long as there is memory.
        self._parquet = pq.ParquetFile(file)
        check_schema(self._parquet.schema_arrow)
        self.is_training = "training_step" in self._parquet.schema_arrow.names
        metadata = self._parquet.metadata
        self.sizes: Sequence[int] = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

    def refresh(self) -> None:
        pass

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        there = [name for name in columns if name in self._parquet.schema_arrow.names]
        return fill_columns(self._parquet.read_row_groups(list(groups), there), columns)

    def close(self) -> None:
        self._parquet.close()


class _StreamGroups:
    """Batches of an Arrow stream, found by their offsets; a batch that is not yet whole is left for later."""

    is_training = False
    problem = None

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file = file.open("rb")
        self._schema: pa.Schema | None = None
        self._head = b""
        self._offsets: list[int] = []
        self._end = 0
        self.sizes: list[int] = []
        try:
            self.refresh()
        except BaseException:
            self._file.close()
            raise

    def refresh(self) -> None:
        if self._schema is None and not self._read_schema():
            return
        self._file.seek(self._end)
        while (message := self._next_message()) is not None:
            self.sizes.append(self._decode(message, [_COUNTED]).num_rows)
            self._offsets.append(self._end)
            self._end = self._file.tell()

    def _read_schema(self) -> bool:
        self._file.seek(0)
        try:
            schema = pa.ipc.read_schema(pa.ipc.read_message(self._file))
        except (pa.ArrowInvalid, EOFError, OSError):
            return False  # the writer has not written the head of the stream yet
        check_schema(schema)
        self._schema, self._end = schema, self._file.tell()
        self._head = schema.serialize().to_pybytes()
        return True

    def _next_message(self) -> pa.Message | None:
        try:
            return pa.ipc.read_message(self._file)
        except (pa.ArrowInvalid, EOFError, OSError):
            return None

    def _decode(self, message: pa.Message, columns: Sequence[str]) -> pa.Table:
        """Return some columns of a batch; the others are not decompressed."""
        assert self._schema is not None
        places = sorted({self._schema.get_field_index(name) for name in columns} - {-1})
        stream = pa.BufferReader(b"".join([self._head, message.serialize()]))
        return pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(included_fields=places)).read_all()

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        if self._schema is None or not groups:
            return SCHEMA.empty_table().select(list(columns))
        batches = []
        for group in groups:
            self._file.seek(self._offsets[group])
            batches.append(self._decode(pa.ipc.read_message(self._file), columns))
        return fill_columns(pa.concat_tables(batches), columns)

    def close(self) -> None:
        self._file.close()


class _JsonlGroups:
    """Groups of lines, found by their offsets; a last line without its newline is left for later."""

    is_training = False
    problem = None

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file = file.open("rb")
        self._offsets: list[int] = []
        self._end = 0
        self.sizes: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        self._file.seek(self._end)
        while (line := self._file.readline()).endswith(b"\n"):
            if not self.sizes or self.sizes[-1] == _LINES_PER_GROUP:
                self._offsets.append(self._end)
                self.sizes.append(0)
            self.sizes[-1] += 1
            self._end += len(line)

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        lines = []
        for group in groups:
            self._file.seek(self._offsets[group])
            lines += [self._file.readline() for _ in range(self.sizes[group])]
        return fill_columns(lines_to_table(lines), columns)

    def close(self) -> None:
        self._file.close()
