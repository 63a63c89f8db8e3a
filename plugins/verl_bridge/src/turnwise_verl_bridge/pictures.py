"""
Pictures in verl's forms: parts of its messages, images of its servers and loops, and inputs of its trainers.

Source: `AgentLoopWorker` in `verl/experimental/agent_loop/agent_loop.py` of https://github.com/verl-project/verl, its
methods `_compute_multi_modal_inputs` and `_compute_position_ids`. torch, transformers and pillow are imported when they
are needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, field

from turnwise import Trajectory
from turnwise.errors import DataError, InfrastructureError
from turnwise.media import MAX_PICTURE_BYTES, decode_picture, find_picture, picture_part, read_picture
from turnwise.types import Message, Picture, PlacedPicture
from turnwise_engine_support.picture_families import PictureArrays, axis_positions
from turnwise_engine_support.pictures import PictureReader


def read_message(message: Mapping[str, object]) -> Message:
    """
    Return a message of verl's data set, with its pictures in turnwise's form.

    Raises:
        DataError: a picture is no image of pillow and has no bytes, or asks for a size, which the chat ignores.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_read_part(part) for part in content]}


def _read_part(part: object) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    if sizes := sorted(part.keys() - {"type", "image", "text"}):
        raise DataError(f"a picture of verl's data set has {sizes[0]}: set it in the model's processor instead")
    return picture_part(read_image(part.get("image"), "a picture of verl's data set"))


def read_image(image: object, source: str) -> Picture:
    """Return an image of pillow, or its file's bytes, as a picture; the `DataError` of another begins with `source`."""
    data: object = image.get("bytes") if isinstance(image, Mapping) else image
    if isinstance(data, bytes):
        return read_picture(data, source)
    if not hasattr(data, "convert"):
        raise DataError(f"{source} must be an image of pillow, or have bytes")
    # verl has decoded it, so its file is gone; PNG loses nothing.
    file = io.BytesIO()
    data.convert("RGB").save(file, "PNG")
    if file.tell() > MAX_PICTURE_BYTES:
        raise DataError(f"{source} has {file.tell()} bytes as PNG, more than {MAX_PICTURE_BYTES}")
    return find_picture(file.getvalue(), "image/png")


def images_of(pictures: Iterable[PlacedPicture]) -> list[Any]:
    """Return pictures as images of pillow, as verl's servers and processors take them."""
    return [decode_picture(each.picture).convert("RGB") for each in pictures]


@define(eq=False, slots=False)
class VisionRows:
    """
    Computes the fields of rows that verl's trainers read for a vision-language model.

    Attributes:
        directory: of the model.
    """

    directory: Path
    _reader: PictureReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = PictureReader(self.directory)

    @cached_property
    def _model(self) -> Any:
        """The model without weights: its class computes positions."""
        import torch
        from transformers import AutoConfig, AutoModelForImageTextToText

        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self.directory, local_files_only=True)
            return AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]  # it has no types

    def inputs(self, record: Trajectory) -> dict[str, Any]:
        """
        Return `multi_modal_inputs` of a record; empty without pictures.

        Returns:
            `pixel_values`: (patches, numbers of a patch) float32; `image_grid_thw`: (pictures, 3) int64;
            `images_seqlens`: patches of each picture, for each of its steps in time.
        """
        import torch

        arrays = self._read(record)
        if not arrays:
            return {}
        grids = torch.stack([each.grid for each in arrays])
        return {
            "pixel_values": torch.cat([each.pixel_values for each in arrays]),
            "image_grid_thw": grids,
            "images_seqlens": torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0]),
        }

    def positions(self, record: Trajectory) -> Any:
        """Return (4, n) int64 positions: the places of the tokens, and those in time, height and width."""
        import torch

        axes = axis_positions(self._model, len(record), record.pictures, self._read(record))
        return torch.cat([torch.arange(len(record))[None], torch.from_numpy(axes)])

    def padded_positions(self, records: Iterable[Trajectory], attention_mask: Any) -> Any:
        """Return (B, 4, L) positions of rows of a batch, 1 on pads as verl has them."""
        import torch

        rows = []
        for record, mask in zip(records, attention_mask.bool(), strict=True):
            row = torch.ones(4, len(mask), dtype=torch.int64)
            row[:, mask] = self.positions(record)
            rows.append(row)
        return torch.stack(rows)

    def _read(self, record: Trajectory) -> tuple[PictureArrays, ...]:
        """Return the arrays of the pictures; `InfrastructureError` if a placeholder has none."""
        arrays = self._reader.read(record.input_ids, record.pictures)
        # verl's models look for placeholders by their id, so one that was sampled would end the training.
        if int((record.input_ids == self._reader.placeholder).sum()) != sum(p.num_tokens for p in record.pictures):
            raise InfrastructureError("a record has placeholders without a picture, which verl cannot train")
        return arrays
