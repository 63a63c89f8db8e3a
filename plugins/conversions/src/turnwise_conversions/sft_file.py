"""The file of `--to sft`: a row for each conversation, or for each record of a run, with its pictures by reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turnwise import EpisodeResult
from turnwise.errors import DataError
from turnwise.files import atomic_write
from turnwise_conversions.demonstrations import Demonstration
from turnwise_result_files.media import MediaFolder

_FIELDS: Final = [
    ("input_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.uint8())),
    ("labels", pa.list_(pa.int32())),
]
_PICTURE: Final = pa.struct([("start", pa.int32()), ("num_tokens", pa.int32()), ("file", pa.string())])
_BATCH_ITEMS: Final = 256
"""Conversations or episodes that are in memory at a time."""
_IGNORED_LABEL: Final = -100
"""The label that the loss functions of PyTorch and transformers leave out."""


def write_rows(
    out: Path,
    found: Iterator[Sequence[Demonstration]],
    *,
    illustrated: bool,
    empty: str,
    advance: Callable[[int], None] = lambda _number: None,
) -> tuple[int, int]:
    """
    Write the rows that have a token to learn; the file gets its name when all are there.

    Args:
        out: the file.
        found: the rows of each conversation or episode.
        illustrated: the rows have the column `pictures`: the places among the ids, and the names of files below the
            folder of `out`, which are written, too. Files of texts are without it.
        empty: text of the error if no item has a token to learn.
        advance: is told how many more items are done.

    Returns:
        How many items have a row, and how many there are.

    Raises:
        DataError: no item has a token to learn; an error leaves no file.
    """
    schema = pa.schema([*_FIELDS, *([("pictures", pa.list_(_PICTURE))] if illustrated else [])])
    media = MediaFolder(out.parent) if illustrated else None
    num_written = num_read = 0
    with atomic_write(out) as partial, pq.ParquetWriter(partial, schema) as writer:
        while batch := list(islice(found, _BATCH_ITEMS)):
            kept = [[row for row in rows if row.loss_mask.any()] for rows in batch]
            made = [_row_of(row, media) for rows in kept for row in rows]
            writer.write_table(pa.Table.from_pylist(made, schema=schema))
            num_written += sum(map(bool, kept))
            num_read += len(batch)
            advance(len(batch))
        if not num_written:
            raise DataError(empty)
    return num_written, num_read


def _row_of(made: Demonstration, media: MediaFolder | None) -> dict[str, Any]:
    ids, mask = made.input_ids, made.loss_mask
    labels = [int(token) if trained else _IGNORED_LABEL for token, trained in zip(ids, mask, strict=True)]
    row = {"input_ids": ids.tolist(), "loss_mask": mask.astype("uint8").tolist(), "labels": labels}
    if media is None:
        return row
    places = media.put_places(made.pictures)
    return row | {"pictures": [{"start": start, "num_tokens": size, "file": file} for start, size, file in places]}


def rows_of_records(result: EpisodeResult) -> list[Demonstration]:
    """
    Return the records of an episode as rows with unchanged tokens, of which the sampled ones are learned.

    An episode that failed, or whose records are not trained, has none.

    Raises:
        DataError: a record has parallel paths, which see not all tokens before them.
    """
    rows = []
    for record, trained in zip(result.trajectories, result.trained, strict=True):
        if not trained or not result.trainable:
            continue
        if record.has_blocks:
            raise DataError(f"episode {result.uid} has parallel paths, and the rows of SFT have no place for them")
        mask = np.concatenate([np.zeros(record.num_prompt_tokens, bool), record.response_mask.astype(bool)])
        rows.append(Demonstration(input_ids=record.input_ids, loss_mask=mask, pictures=record.pictures))
    return rows
