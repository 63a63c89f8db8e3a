"""
Rows with pictures for SFTTrainer: their pixels, and their positions in time, height and width.

TRL's own form of such rows has messages and decoded images, which its collator renders and encodes anew. Here the ids
are those of a rollout, and the pixels come from the bytes that the engine had, by the processor of engine and trainer.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from trl import SFTTrainer

from turnwise.errors import DataError
from turnwise.types import PlacedPicture
from turnwise_engine_support.pictures import PictureArrays, PictureReader, axis_positions, placeholders_at
from turnwise_result_files.media import MediaFolder
from turnwise_trl_bridge.sft_rows import IGNORED, NUMBER, PICTURES, read_places

_IS_PICTURE: Final = "is_picture"
_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the processor in the directory of a vision-language model, which a trainer with a tokenizer leaves out."""


class PictureSFTTrainer(SFTTrainer):  # type: ignore[misc]  # TRL's classes are Any to mypy
    """SFTTrainer on the batches of `PictureCollator`."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        mask = inputs.pop(_IS_PICTURE, None)
        if mask is None:
            return super().compute_loss(model, inputs, *arguments, **options)
        with placeholders_at(self.accelerator.unwrap_model(model), mask):
            return super().compute_loss(model, inputs, *arguments, **options)


@frozen(eq=False)
class PictureCollator:
    """
    Makes batches of a vision-language model; pixels are computed when a batch is made.

    Attributes:
        model: of transformers, whose positions the rows get.
        reader: of the model.
        folder: of the file of the rows, with their pictures.
        pad_token_id: fills rows on the right.
    """

    model: Any
    reader: PictureReader
    folder: Path
    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Return B rows padded to L tokens.

        Returns:
            `input_ids`, `labels` and `attention_mask`: (B, L) int64; `position_ids`: (4, B, L) int64, the places of the
            tokens, and those in time, height and width. With pictures also `is_picture`: (B, L) bool, `pixel_values`:
            (patches, numbers of a patch) float32, and `image_grid_thw`: (pictures, 3) int64.

        Raises:
            DataError: a picture has changed, cannot be decoded, or does not fit its placeholders.
        """
        media = MediaFolder(self.folder)  # a new one: it holds the pictures of this batch alone
        places = [read_places(row.get(PICTURES), media) for row in rows]
        arrays = [self._read(row, each) for row, each in zip(rows, places, strict=True)]
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "position_ids": torch.arange(shape[1]).expand(4, *shape).clone(),
        }
        mask = torch.zeros(shape, dtype=torch.bool)
        for index, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][index, :size] = torch.tensor(row["input_ids"])
            batch["labels"][index, :size] = torch.tensor(row["labels"])
            batch["attention_mask"][index, :size] = 1
            axes = axis_positions(self.model, size, places[index], arrays[index])
            batch["position_ids"][1:, index, :size] = torch.from_numpy(axes)
            for place in places[index]:
                mask[index, place.start : place.stop] = True
        flat = [each for row in arrays for each in row]
        if flat:
            batch[_IS_PICTURE] = mask
            batch["pixel_values"] = torch.cat([each.pixel_values for each in flat])
            batch["image_grid_thw"] = torch.stack([each.grid for each in flat])
        return batch

    def _read(self, row: Mapping[str, Any], places: Sequence[PlacedPicture]) -> tuple[PictureArrays, ...]:
        try:
            return self.reader.read(torch.tensor(row["input_ids"], dtype=torch.int32).numpy(), places)
        except DataError as error:
            raise DataError(f"row {row[NUMBER]}: {error}") from error


def copy_processor(model: Path, out: Path) -> None:
    """Copy the files of the processor of a model to the folder of the trained one."""
    for name in _FILES:
        if (model / name).is_file() and not (out / name).exists():
            shutil.copyfile(model / name, out / name)
