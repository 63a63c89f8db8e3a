"""
Rows with pictures for SFTTrainer: their pixels, and their positions in time, height and width.

TRL's own form of such rows has messages and decoded images, which its collator renders and encodes anew. Here each
row keeps its ids, and the pixels come from the bytes that the engine had, by the processor of engine and trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from trl import SFTTrainer

from turnwise_engine_support.picture_families import placeholders_at
from turnwise_engine_support.pictures import PictureReader
from turnwise_result_files.media import MediaFolder
from turnwise_trl_bridge.picture_inputs import PaddedRow, picture_inputs
from turnwise_trl_bridge.sft_rows import IGNORED, NUMBER, PICTURES, read_places

_IS_PICTURE: Final = "is_picture"


class PictureSFTTrainer(SFTTrainer):  # type: ignore[misc]  # TRL's classes are Any to mypy
    """SFTTrainer on the batches of `PictureCollator`."""

    def compute_loss(self, model: object, inputs: dict[str, Any], *arguments: object, **options: object) -> Any:
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
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        padded = []
        for index, row in enumerate(rows):
            size, places = len(row["input_ids"]), read_places(row.get(PICTURES), media)
            batch["input_ids"][index, :size] = torch.tensor(row["input_ids"])
            batch["labels"][index, :size] = torch.tensor(row["labels"])
            batch["attention_mask"][index, :size] = 1
            padded.append(PaddedRow(f"row {row.get(NUMBER, index)}", 0, size, places))
        inputs, mask = picture_inputs(self.model, self.reader, batch["input_ids"], padded)
        return batch | inputs | ({} if mask is None else {_IS_PICTURE: mask})
