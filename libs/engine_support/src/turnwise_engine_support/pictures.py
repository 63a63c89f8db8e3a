"""
Reads the pictures of a vision-language model of transformers: their arrays, and the places of their placeholders.

Engine and trainer both use it, so that both compute the same pixels from the same bytes. torch, transformers and pillow
are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.errors import ConfigError, DataError
from turnwise.media import decode_picture
from turnwise.sized_cache import SizedCache
from turnwise.types import Picture, PlacedPicture, TokenArray
from turnwise_engine_support.error_lines import engine_errors, error_line
from turnwise_engine_support.picture_families import (
    PictureArrays,
    PictureFamily,
    find_family,
    supported_families,
)

_CACHE_BYTES: Final = 1 << 28
"""Of arrays that a reader keeps. A picture of a million pixels has 12 to 24 MB of them."""


@define(eq=False)
class PictureReader:
    """
    Computes the arrays of pictures, once for each key while they fit its cache. Threads may share it.

    Attributes:
        directory: of the model.
        max_bytes: of the arrays that it keeps: the ones that were used last.
        num_computed: how often it has computed arrays.
        family: of the model.
        placeholder: the id of a part of a picture.
    """

    directory: Path
    max_bytes: int = _CACHE_BYTES
    num_computed: int = field(default=0, init=False)
    family: PictureFamily = field(init=False)
    placeholder: int = field(init=False)
    _config: Any = field(init=False)
    _processor: Any = field(init=False)
    _cache: SizedCache[str, PictureArrays] = field(init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._cache = SizedCache(self.max_bytes)
        family = find_family(self.directory)
        if family is None:
            raise ConfigError(f"pictures of {str(self.directory)!r} are not supported: {supported_families()}")
        self.family = family
        self._config, self._processor = _load_parts(self.directory)
        self.placeholder = int(self._config.image_token_id)

    def read(self, token_ids: TokenArray, places: Sequence[PlacedPicture]) -> tuple[PictureArrays, ...]:
        """
        Return the arrays of the pictures of some ids.

        Args:
            token_ids: (n,) ids with placeholders.
            places: of the pictures, in their order.

        Raises:
            DataError: a picture cannot be decoded, overlaps or touches another, lies outside the ids or on other ids
                than placeholders, or has another number of placeholders than the processor computes.
        """
        last = -1 if self.family.has_axes else 0
        for place in places:
            subject = f"the picture {place.picture.key[:12]} at tokens {place.start} to {place.stop}"
            # Positions with axes take placeholders that follow one another for one picture.
            if place.start < last or (place.start == last and self.family.has_axes) or place.stop > len(token_ids):
                raise DataError(f"{subject} touches another picture, or ends behind the {len(token_ids)} tokens")
            ids = token_ids[place.start : place.stop]
            wrong = ids[[0, -1]] if self.family.has_marks else ids
            if (wrong != self.placeholder).any():
                raise DataError(f"{subject} is on ids that are not the model's placeholder, {self.placeholder}")
            last = place.stop
        found = tuple(self.arrays(place.picture) for place in places)
        for place, arrays in zip(places, found, strict=True):
            num_tokens = int((token_ids[place.start : place.stop] == self.placeholder).sum())
            if num_tokens != arrays.num_tokens:
                raise DataError(
                    f"the picture {place.picture.key[:12]} at token {place.start} has {num_tokens} placeholders,"
                    f" but the model's processor computes {arrays.num_tokens}"
                )
        return found

    def feature_rows(self, token_ids: TokenArray, places: Sequence[PlacedPicture]) -> NDArray[np.int64]:
        """
        Return for (n,) ids the rows of their features, if the features of all pictures are in one array; -1 for text.

        Args:
            token_ids: (n,) ids with placeholders. A sampled placeholder, outside the places, is text.
            places: of the pictures, in their order.
        """
        inside = np.zeros(len(token_ids), np.bool_)
        for place in places:
            inside[place.start : place.stop] = token_ids[place.start : place.stop] == self.placeholder
        return np.where(inside, np.cumsum(inside) - 1, -1)

    def arrays(self, picture: Picture) -> PictureArrays:
        """Return the arrays of a picture; `DataError` if its bytes are no picture."""
        # One thread computes at a time, so that a group of requests with one picture computes it once.
        with self._lock:
            if (found := self._cache.get(picture.key)) is not None:
                return found
            arrays = self._compute(picture)
            self.num_computed += 1
            self._cache.put(picture.key, arrays, arrays.num_bytes)
            return arrays

    def _compute(self, picture: Picture) -> PictureArrays:
        image = decode_picture(picture).convert("RGB")  # as transformers itself does
        try:
            return self.family.compute(self._processor, image, self._config)
        except Exception as error:
            raise DataError(f"the processor refuses picture {picture.key[:12]}: {error_line(error)}") from error


def _load_parts(directory: Path) -> tuple[Any, Any]:
    """Return config and image processor of a model; `ConfigError` if they cannot be loaded."""
    with engine_errors(f"cannot load the image processor of {str(directory)!r}", ConfigError):
        try:
            import PIL  # noqa: F401 - only asks for it: the error of transformers has many lines
        except ModuleNotFoundError as error:
            raise ConfigError("pictures need pillow: pip install pillow") from error
        from transformers import AutoConfig, AutoImageProcessor

        # The backend on pillow, also where torchvision is installed: its resizing differs in the last bits.
        loader: Any = AutoImageProcessor
        processor = loader.from_pretrained(directory, backend="pil", local_files_only=True)
        return AutoConfig.from_pretrained(directory, local_files_only=True), processor
