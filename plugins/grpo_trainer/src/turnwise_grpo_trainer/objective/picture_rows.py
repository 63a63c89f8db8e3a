"""Adds pictures to rows: their places, and where the model has these axes, positions in time, height and width."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from turnwise.errors import DataError
from turnwise_engine_support.pictures import PictureReader
from turnwise_grpo_trainer.objective.row_pictures import PictureRows, Pictures
from turnwise_grpo_trainer.objective.rows import TokenRows

AXIS_SHIFT: Final = "axis_shift"
"""Name of the (N, 3) int64 column of a model with three axes: what its positions are beyond `position_ids`."""
IS_PICTURE: Final = "is_picture"
"""Name of the (N,) int64 column of a vision-language model: 1 on placeholders of pictures."""


def add_pictures(rows: TokenRows, pictures: Pictures, reader: PictureReader | None, model: object) -> TokenRows:
    """
    Return rows as the model reads them: for a vision-language model, with placeholders and, if it has them, axes.

    Args:
        rows: B rows.
        pictures: of each row.
        reader: of the model; None for a model without pictures.
        model: the model to train, whose positions they get.

    Raises:
        DataError: a picture that the reader refuses, any picture without a reader, or a row with parallel paths and a
            picture.
    """
    if reader is None:
        if any(pictures):
            raise DataError("the batch has pictures, which the model to train does not read")
        return rows
    shift = torch.zeros(rows.num_tokens, 3, dtype=torch.int64)
    mask = torch.zeros(rows.num_tokens, dtype=torch.int64)
    num_patches = []
    for row, places in enumerate(pictures):
        start, stop = rows.bounds[row], rows.bounds[row + 1]
        if places and bool(rows["path_start"][start:stop].any()):
            raise DataError(f"row {row} has parallel paths and a picture, whose positions are not defined")
        ids = rows["input_ids"][start:stop].int().numpy()
        arrays = reader.read(ids, places)
        num_patches.append(sum(each.num_patches for each in arrays))
        if not places:
            continue
        mask[start:stop] = torch.from_numpy(reader.feature_rows(ids, places) >= 0)
        if (axes := reader.family.axes(model, stop - start, places, arrays)) is not None:
            shift[start:stop] = torch.from_numpy(axes).T - rows["position_ids"][start:stop, None]
    added = {AXIS_SHIFT: shift, IS_PICTURE: mask} if reader.family.has_axes else {IS_PICTURE: mask}
    columns = rows.with_columns(**added)
    return evolve(columns, pictures=PictureRows(tuple(map(tuple, pictures)), tuple(num_patches), reader))


def picture_inputs(rows: TokenRows, positions: Tensor, scatter: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """
    Return the fields of a micro-batch that only vision-language models have; none for another model.

    Args:
        rows: of the micro-batch, in its order.
        positions: (b, L) of the micro-batch.
        scatter: puts (N,) values of tokens into (b, L) columns, 0 on pads.
    """
    fields: dict[str, object] = {}
    if AXIS_SHIFT in rows.columns:
        fields["axes"] = positions + torch.stack([scatter(shift) for shift in rows[AXIS_SHIFT].unbind(1)])
    if rows.pictures is not None and (inputs := rows.pictures.inputs()):
        fields |= {"is_picture": scatter(rows[IS_PICTURE]).bool(), "pictures": inputs}
    return fields
