"""
Pictures of a vision-language model of transformers: their arrays, their positions, and the places of placeholders.

Engine and trainer both use it, so that both compute the same pixels from the same bytes. torch, transformers and pillow
are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from turnwise.errors import ConfigError, DataError
from turnwise.media import decode_picture
from turnwise.sized_cache import SizedCache
from turnwise.types import Picture, PlacedPicture, TokenArray
from turnwise_engine_support.error_lines import engine_errors, error_line
from turnwise_engine_support.model_directory import read_model_config, read_whole_config

_MODEL_TYPES: Final = ("qwen2_5_vl", "qwen3_vl")
"""Models whose placeholders of a picture follow one another, and whose positions have three axes."""

_CACHE_BYTES: Final = 1 << 28
"""Of arrays that a reader keeps. A picture of a million pixels has 12 to 24 MB of them."""


def supports_pictures(path: Path | None) -> bool:
    """Return whether a model directory has a vision-language model that this module knows."""
    return read_whole_config(path).get("model_type") in _MODEL_TYPES


def axes_take_turns(path: Path) -> bool:
    """
    Return whether an engine that asks the model's config reads positions as transformers does.

    transformers always lets the three axes of a Qwen3-VL take turns; vLLM and SGLang ask for an entry.
    """
    text = read_model_config(path)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return read_whole_config(path).get("model_type") != "qwen3_vl" or bool(rope.get("mrope_interleaved"))


@frozen(kw_only=True, eq=False)
class PictureArrays:
    """
    The arrays of a picture, as the model's own image processor computes them.

    Attributes:
        pixel_values: (patches, numbers of a patch) float32 tensor.
        grid: (3,) int64 tensor, the patches in time, height and width.
        num_tokens: placeholders that the model needs for them.
    """

    pixel_values: Any
    grid: Any
    num_tokens: int


@define(eq=False)
class PictureReader:
    """
    Computes the arrays of pictures, once for each key while they fit its cache. Threads may share it.

    Attributes:
        directory: of the model.
        max_bytes: of the arrays that it keeps: the ones that were used last.
        num_computed: how often it has computed arrays.
        placeholder: the id of a part of a picture.
    """

    directory: Path
    max_bytes: int = _CACHE_BYTES
    num_computed: int = field(default=0, init=False)
    placeholder: int = field(init=False)
    _processor: Any = field(init=False)
    _cache: SizedCache[str, PictureArrays] = field(init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._cache = SizedCache(self.max_bytes)
        self.placeholder = int(read_whole_config(self.directory)["image_token_id"])
        self._processor = _load_processor(self.directory)

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
        last = -1
        for place in places:
            subject = f"the picture {place.picture.key[:12]} at tokens {place.start} to {place.stop}"
            if place.start <= last or place.stop > len(token_ids):
                # The model's positions take placeholders that follow one another for one picture.
                raise DataError(f"{subject} touches another picture, or ends behind the {len(token_ids)} tokens")
            if (token_ids[place.start : place.stop] != self.placeholder).any():
                raise DataError(f"{subject} is on ids that are not the model's placeholder, {self.placeholder}")
            last = place.stop
        found = tuple(self.arrays(place.picture) for place in places)
        for place, arrays in zip(places, found, strict=True):
            if place.num_tokens != arrays.num_tokens:
                raise DataError(
                    f"the picture {place.picture.key[:12]} at token {place.start} has {place.num_tokens} placeholders,"
                    f" but the model's processor computes {arrays.num_tokens}"
                )
        return found

    def arrays(self, picture: Picture) -> PictureArrays:
        """Return the arrays of a picture; `DataError` if its bytes are no picture."""
        # One thread computes at a time, so that a group of requests with one picture computes it once.
        with self._lock:
            if (found := self._cache.get(picture.key)) is not None:
                return found
            arrays = self._compute(picture)
            self.num_computed += 1
            self._cache.put(picture.key, arrays, arrays.pixel_values.nbytes)
            return arrays

    def _compute(self, picture: Picture) -> PictureArrays:
        image = decode_picture(picture).convert("RGB")  # as transformers itself does
        try:
            found = self._processor(images=[image], return_tensors="pt")
        except Exception as error:
            raise DataError(f"the processor refuses picture {picture.key[:12]}: {error_line(error)}") from error
        grid = found["image_grid_thw"][0]
        num_tokens = int(grid.prod()) // self._processor.merge_size**2
        return PictureArrays(pixel_values=found["pixel_values"], grid=grid, num_tokens=num_tokens)


def _load_processor(directory: Path) -> Any:
    with engine_errors(f"cannot load the image processor of {str(directory)!r}", ConfigError):
        try:
            import PIL  # noqa: F401 - only asks for it: the error of transformers has many lines
        except ModuleNotFoundError as error:
            raise ConfigError("pictures need pillow: pip install pillow") from error
        from transformers import AutoImageProcessor

        # The backend on pillow, also where torchvision is installed: its resizing differs in the last bits.
        return AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)  # type: ignore[no-untyped-call]  # transformers leaves it so


def axis_positions(
    model: Any, num_tokens: int, places: Sequence[PlacedPicture], arrays: Sequence[PictureArrays]
) -> NDArray[np.int64]:
    """
    Return the positions of a context with pictures, by the model's own `get_rope_index`.

    Args:
        model: a vision-language model of transformers.
        num_tokens: of the context, at least 1.
        places: of its pictures, which do not touch.
        arrays: of these pictures.

    Returns:
        (3, n): in time, height and width. The next token has 1 more than the largest on each axis.
    """
    import torch

    types = torch.zeros(1, num_tokens, dtype=torch.int64)
    for place in places:
        types[0, place.start : place.stop] = 1
    grids = torch.stack([each.grid for each in arrays]) if arrays else None
    found, _delta = model.model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=grids)
    positions: NDArray[np.int64] = found[:, 0].numpy()
    return positions


@contextmanager
def placeholders_at(model: Any, mask: Any) -> Iterator[None]:
    """
    Let a forward pass read the placeholders of pictures by their places, not by their id.

    A model may sample the id of a placeholder, which is then text and has no picture.

    Args:
        model: a vision-language model of transformers.
        mask: (B, L) bool, True on placeholders of pictures, which the features fill in order of rows.
    """
    inner = model.model
    places = mask[:, :, None]
    inner.get_placeholder_mask = lambda *_args, **_options: (places, None)
    try:
        yield
    finally:
        del inner.get_placeholder_mask
