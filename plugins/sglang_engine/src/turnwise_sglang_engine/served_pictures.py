"""
Pictures in SGLang's process: their arrays and the positions of their parts.

SGLang gets arrays that are computed here as the trainer does, at the places that the request gives. Its own processor
would find placeholders by their id, also one that the model has sampled, and resizes with torchvision, whose last bits
differ from pillow's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from turnwise.types import PlacedPicture
from turnwise_engine_support.picture_families import PictureArrays
from turnwise_engine_support.pictures import PictureReader
from turnwise_sglang_engine.frames import Array
from turnwise_sglang_engine.pictures import Described, ReceivedPictures

_ENVIRONMENT: Final = {
    # SGLang imports the processors of pictures in this package after its own.
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "turnwise_sglang_engine.processors",
    # Its cache of encoded pictures outlives new weights of the vision tower; the prefix cache does not.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
}

Grid = tuple[int, int, int]
"""Placeholders of a picture in time, height and width."""


@frozen(eq=False)
class ServedPicture:
    """
    A picture of a request, in the list `image_data` of SGLang's request.

    Attributes:
        place: of its placeholders.
        arrays: of the picture.
    """

    place: PlacedPicture
    arrays: PictureArrays


@define(eq=False)
class ServedPictures:
    """
    The pictures of requests. `ConfigError` if the image processor of the model cannot be loaded.

    Attributes:
        directory: of the model.
    """

    directory: Path
    _received: ReceivedPictures = field(factory=ReceivedPictures, init=False)
    _reader: PictureReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        os.environ.update(_ENVIRONMENT)
        self._reader = PictureReader(self.directory)

    def take(self, described: Sequence[Described], sent: Sequence[Array]) -> tuple[PlacedPicture, ...]:
        """Return the pictures of a frame. Every frame must come here, in the order in which it was sent."""
        return self._received.take(described, sent)

    async def read(self, context: Sequence[int], places: Sequence[PlacedPicture]) -> list[ServedPicture]:
        """Return the arrays of pictures; `DataError` if one is broken or does not fit its placeholders."""
        arrays = await asyncio.to_thread(self._reader.read, np.asarray(context, np.int32), places)
        return [ServedPicture(*each) for each in zip(places, arrays, strict=True)]


def picture_positions(num_tokens: int, places: Sequence[PlacedPicture], grids: Sequence[Grid]) -> NDArray[np.int64]:
    """
    Return the positions of a context with pictures and of the token behind it.

    A text counts on from the largest position before it. In a picture each axis counts from there.

    Args:
        num_tokens: of the context.
        places: of its pictures, in their order.
        grids: of these pictures.

    Returns:
        (3, num_tokens + 1): in time, height and width.
    """
    found = np.empty((3, num_tokens + 1), np.int64)
    end = position = 0
    for place, grid in zip(places, grids, strict=True):
        position = _count_text(found[:, end : place.start], position)
        found[:, place.start : place.stop] = position + np.indices(grid).reshape(3, -1)
        position += max(grid)
        end = place.stop
    _count_text(found[:, end:], position)
    return found


def _count_text(found: NDArray[np.int64], position: int) -> int:
    """Fill positions of a text, and return the next one."""
    num_tokens = len(found[0])
    found[:] = position + np.arange(num_tokens)
    return position + num_tokens
