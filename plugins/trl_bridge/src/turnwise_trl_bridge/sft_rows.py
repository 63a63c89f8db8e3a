"""The rows of `turnwise sft`: token ids and labels, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turnwise.errors import DataError
from turnwise.media import MediaTokens
from turnwise.types import PlacedPicture
from turnwise_result_files.media import MediaFolder

COLUMNS: Final = ("input_ids", "labels")
IGNORED: Final = -100
"""The label of a token that is not learned."""
PICTURES: Final = "pictures"
"""Column with the places of the pictures of a row; a file without pictures has none."""
NUMBER: Final = "number"
"""Column with the number of a row, beside its pictures."""
_PICTURE: Final = pa.struct([("start", pa.int64()), ("num_tokens", pa.int64()), ("file", pa.string())])


def read_rows(path: Path) -> pa.Table:
    """
    Return the columns `input_ids` and `labels` of a file that `turnwise convert --to sft` writes.

    A label is the id of its token. The trainer compares it with the prediction at the token before, so it never learns
    the first token of a row. If the file has the column `pictures`, it is returned, too, with the numbers of the rows.

    Raises:
        DataError: the file cannot be read, a row is malformed, no row has a token to learn, or the file of a picture is
            missing or has changed.
    """
    try:
        with pq.ParquetFile(path) as file:
            if not set(COLUMNS) <= set(file.schema_arrow.names) or file.metadata.num_rows == 0:
                raise DataError(
                    f"{path}: expected rows with input_ids and labels, as `turnwise convert --to sft` writes them"
                )
            table = file.read([*COLUMNS, *({PICTURES} & set(file.schema_arrow.names))])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    ids, labels = (_lists(table.column(name), f"{path}: {name}") for name in COLUMNS)
    _check_rows(path, ids, labels)
    found = pa.table([ids.cast(pa.list_(pa.int64())), labels.cast(pa.list_(pa.int64()))], names=list(COLUMNS))
    return _with_pictures(path, found, table.column(PICTURES)) if PICTURES in table.column_names else found


def _with_pictures(path: Path, table: pa.Table, column: pa.ChunkedArray) -> pa.Table:
    try:
        places = column.cast(pa.list_(_PICTURE))
    except pa.ArrowException as error:
        form = "{start, num_tokens, file}"
        raise DataError(f"{path}: {PICTURES}: expected a list of {form} in each row, got {column.type}") from error
    media = MediaFolder(path.parent)
    for number, row in enumerate(places):
        if row.as_py():
            try:
                _check_pictures(read_places(row.as_py(), media), *(table.column(name)[number] for name in COLUMNS))
            except (TypeError, ValueError, DataError) as error:
                raise DataError(f"{path}: row {number}: {error}") from error
            media = MediaFolder(path.parent)  # which would hold the pictures of all rows
    return table.append_column(PICTURES, places).append_column(NUMBER, pa.array(range(len(places)), pa.int64()))


def read_places(places: Sequence[Mapping[str, object]] | None, media: MediaFolder) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a row; `DataError` if the file of one is missing or has changed."""
    return media.get_places([(each["start"], each["num_tokens"], each["file"]) for each in places or ()])


def _check_pictures(pictures: Sequence[PlacedPicture], ids: pa.Scalar, labels: pa.Scalar) -> None:
    """Raise `ValueError` for pictures that overlap or lie outside of the row, or whose placeholders are learned."""
    MediaTokens(token_ids=ids.values.to_numpy(zero_copy_only=False), pictures=pictures)
    learned = labels.values.to_numpy(zero_copy_only=False) != IGNORED
    for each in pictures:
        if learned[each.start : each.stop].any():
            raise ValueError(f"the picture of tokens {each.start} to {each.stop} has labels, which must be {IGNORED}")


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
