"""The inputs of a vision-language model beside ids, as engine and trainer compute them from the bytes of pictures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from turnwise.errors import DataError
from turnwise.types import PlacedPicture
from turnwise_engine_support.picture_families import PictureArrays, axis_positions
from turnwise_engine_support.pictures import PictureReader

_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the processor in the directory of a vision-language model, which a trainer with a tokenizer leaves out."""


@frozen(eq=False)
class PaddedRow:
    """
    A row of a padded batch.

    Attributes:
        name: for errors.
        start: column of its first token.
        stop: column after its last token; pads behind it may be among them.
        pictures: with their places among its own tokens.
    """

    name: str
    start: int
    stop: int
    pictures: Sequence[PlacedPicture]


def picture_inputs(
    model: object, reader: PictureReader, ids: Tensor, rows: Sequence[PaddedRow]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """
    Return the inputs of some padded rows beside ids and mask, and the places of placeholders.

    Args:
        model: of transformers, whose positions the rows get.
        reader: of the model.
        ids: (B, L) of the rows.
        rows: B of them.

    Returns:
        `position_ids`: (4, B, L) int64, the places of the tokens, and those in time, height and width. With pictures
        also `pixel_values`: (patches, numbers of a patch) float32, and `image_grid_thw`: (pictures, 3) int64. The
        second value is (B, L) bool, True on placeholders; None without pictures.

    Raises:
        DataError: a picture cannot be decoded, or does not fit its placeholders.
    """
    positions = torch.zeros(4, *ids.shape, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    found: list[PictureArrays] = []
    for index, row in enumerate(rows):
        size, own = row.stop - row.start, slice(row.start, row.stop)
        try:
            arrays = reader.read(ids[index, own].int().cpu().numpy(), row.pictures)
        except DataError as error:
            raise DataError(f"{row.name}: {error}") from error
        found += arrays
        # Positions continue over pads: transformers may take a jump for the start of another sequence.
        positions[0, index, row.start :] = torch.arange(ids.shape[1] - row.start)
        positions[1:, index, own] = torch.from_numpy(axis_positions(model, size, row.pictures, arrays))
        for place in row.pictures:
            mask[index, row.start + place.start : row.start + place.stop] = True
    inputs = {"position_ids": positions.to(ids.device)}
    if not found:
        return inputs, None
    inputs["pixel_values"] = torch.cat([each.pixel_values for each in found]).to(ids.device)
    inputs["image_grid_thw"] = torch.stack([each.grid for each in found]).to(ids.device)
    return inputs, mask.to(ids.device)


def copy_processor(model: Path, out: Path) -> None:
    """Copy the files of the processor of a model to the folder of the trained one."""
    for name in _FILES:
        if (model / name).is_file() and not (out / name).exists():
            shutil.copyfile(model / name, out / name)
