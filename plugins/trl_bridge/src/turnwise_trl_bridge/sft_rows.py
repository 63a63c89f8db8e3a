"""The rows of `turnwise sft`: token ids and labels, checked before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turnwise.errors import DataError

COLUMNS: Final = ("input_ids", "labels")
IGNORED: Final = -100
"""The label of a token that is not learned."""


def read_rows(path: Path) -> pa.Table:
    """
    Return the columns `input_ids` and `labels` of a file that `turnwise convert --to sft` writes.

    A label is the id of its token. The trainer compares it with the prediction at the token before, so it never learns
    the first token of a row.

    Raises:
        DataError: the file cannot be read, a row is malformed, or no row has a token to learn.
    """
    try:
        with pq.ParquetFile(path) as file:
            if not set(COLUMNS) <= set(file.schema_arrow.names) or file.metadata.num_rows == 0:
                raise DataError(
                    f"{path}: expected rows with input_ids and labels, as `turnwise convert --to sft` writes them"
                )
            table = file.read(list(COLUMNS))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    ids, labels = (_lists(table.column(name), f"{path}: {name}") for name in COLUMNS)
    _check_rows(path, ids, labels)
    return pa.table([ids.cast(pa.list_(pa.int64())), labels.cast(pa.list_(pa.int64()))], names=list(COLUMNS))


def _lists(column: pa.ChunkedArray, where: str) -> pa.ListArray | pa.LargeListArray:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise DataError(f"{where}: expected a list of integers in each row, got {kind}")
    found = column.combine_chunks()
    if found.null_count or pc.list_flatten(found).null_count:
        raise DataError(f"{where}: row {_first_with_null(found)} has a null")
    return found.cast(pa.large_list(kind.value_type)) if pa.types.is_fixed_size_list(kind) else found


def _first_with_null(found: pa.Array) -> int:
    return next(
        number for number, row in enumerate(found) if not row.is_valid or any(not each.is_valid for each in row.values)
    )


def _check_rows(path: Path, ids: pa.Array, labels: pa.Array) -> None:
    lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
    others = pc.list_value_length(labels).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero(lengths != others)).size:
        row = int(wrong[0])
        raise DataError(f"{path}: row {row} has {lengths[row]} input_ids and {others[row]} labels")
    if (wrong := np.flatnonzero(lengths == 0)).size:
        raise DataError(f"{path}: row {int(wrong[0])} has no tokens")
    flat_ids, flat_labels = (pc.list_flatten(each).to_numpy(zero_copy_only=False) for each in (ids, labels))
    if (wrong := np.flatnonzero((flat_labels != IGNORED) & (flat_labels != flat_ids))).size:
        row, token = _row_and_token(lengths, int(wrong[0]))
        raise DataError(
            f"{path}: row {row}: the label of token {token} is {flat_labels[wrong[0]]}, and must be {IGNORED} or its"
            f" id {flat_ids[wrong[0]]}; the trainer shifts labels itself"
        )
    learned = flat_labels != IGNORED
    learned[np.cumsum(lengths) - lengths] = False
    if not learned.any():
        raise DataError(f"{path}: no row has a token to learn: each label is {IGNORED}, or of the first token of a row")


def check_vocabulary(path: Path, table: pa.Table, num_ids: int) -> None:
    """Raise `DataError` for an id that a model with a number of ids does not have."""
    ids = table.column(COLUMNS[0]).combine_chunks()
    flat = pc.list_flatten(ids).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero((flat < 0) | (flat >= num_ids))).size:
        lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
        row, token = _row_and_token(lengths, int(wrong[0]))
        raise DataError(
            f"{path}: row {row}: token {token} has the id {flat[wrong[0]]}, and the model has the ids 0 to"
            f" {num_ids - 1}; convert the conversations again with --model of this model"
        )


def _row_and_token(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], position: int) -> tuple[int, int]:
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row] - lengths[row])
