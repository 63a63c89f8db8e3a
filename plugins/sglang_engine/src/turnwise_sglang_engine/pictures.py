"""
Pictures on their way to SGLang: which engine takes them, and how their bytes reach SGLang's process.

The bytes of a picture go there once. Both ends keep the pictures that were used last by the same rule and see requests
in the same order, so each knows what the other has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, field

from turnwise.errors import ConfigError
from turnwise.media import Picture, PictureName, find_picture
from turnwise.sized_cache import SizedCache
from turnwise.types import PlacedPicture
from turnwise_engine_support.model_directory import axes_take_turns, read_whole_config
from turnwise_engine_support.picture_families import supports_grids
from turnwise_engine_support.weight_checks import checkpoint_name
from turnwise_sglang_engine.frames import Array

_KEPT_BYTES: Final = 1 << 28
"""Of pictures that SGLang's process keeps."""
_QWEN_2_5_PATCH: Final = 1176
"""Numbers in a patch of Qwen2.5-VL: SGLang takes an array of any other width for features of its vision tower."""

Described = tuple[int, int, str, str, bool]
"""Of a picture in the head of a frame: start, placeholders, key, media type, and whether its bytes are in the frame."""


def reads_pictures(engine_args: Mapping[str, Any], path: Path | None) -> bool:
    """Return whether the engine takes requests with pictures: not if an argument of SGLang leaves them out."""
    limits = engine_args.get("limit_mm_data_per_request") or {}
    return (
        supports_grids(path)
        and not engine_args.get("language_model_only")
        and engine_args.get("enable_multimodal") is not False
        and limits.get("image") != 0
    )


def check_pictures(engine_args: Mapping[str, object], path: Path) -> None:
    """Raise `ConfigError` if SGLang cannot load a vision-language model, or would see pictures as no trainer does."""
    if not reads_pictures(engine_args, path):
        return
    if find_spec("torchvision") is None:
        raise ConfigError(
            f"{str(path)!r} is a vision-language model, for which SGLang needs torchvision: install the release of"
            " torchvision that belongs to the installed torch"
        )
    if (numbers := _numbers_of_a_patch(path)) != _QWEN_2_5_PATCH and _is_qwen_2_5(path):
        raise ConfigError(
            f"a patch of {str(path)!r} has {numbers} numbers: SGLang reads the pictures of a Qwen2.5-VL only with"
            f" {_QWEN_2_5_PATCH}, which are patches of 14 x 14 pixels"
        )
    if not axes_take_turns(path):
        raise ConfigError(
            f"the rope_parameters of {str(path)!r} lack mrope_interleaved, which transformers takes for granted: add"
            " it as true, or SGLang would give the parts of a picture other positions"
        )
    for name, reason in _REFUSED.items():
        if engine_args.get(name) not in (None, "auto", "sglang"):
            raise ConfigError(f"engine_args.{name}: {reason}")


_REFUSED: Final = {
    "mm_process_config": "pictures are read as the model's preprocessor_config.json says, which the trainer reads too:"
    " change it there",
    "model_impl": "pictures need SGLang's own implementation of the model",
    "rl_on_policy_target": "with it, SGLang gives the parts of a picture the positions of a text",
}


def weight_names(path: Path | None) -> Callable[[str], str]:
    """
    Return the function from a name of a weight to the one that SGLang knows.

    SGLang loads a Qwen2.5-VL by the older names of its checkpoints, and ignores the weights of the vision tower under
    other names without an error.
    """
    return checkpoint_name if path is not None and _is_qwen_2_5(path) else str


def _is_qwen_2_5(path: Path) -> bool:
    return bool(read_whole_config(path).get("model_type") == "qwen2_5_vl")


def _numbers_of_a_patch(path: Path) -> int:
    vision = read_whole_config(path).get("vision_config", {})
    in_time, in_space = vision.get("temporal_patch_size", 2), vision.get("patch_size", 14)
    return int(vision.get("in_channels", 3) * in_time * in_space**2)


def _make_cache() -> SizedCache[PictureName, Any]:
    return SizedCache(_KEPT_BYTES)


@define(eq=False)
class SentPictures:
    """
    The engine's end: knows which pictures SGLang's process keeps.

    Attributes:
        are_read: whether the engine takes pictures.
    """

    are_read: bool
    _kept: SizedCache[PictureName, bool] = field(factory=_make_cache)

    def pack(self, places: Sequence[PlacedPicture]) -> tuple[list[Described], list[Array]]:
        """Return what the head of a frame says of pictures, and the bytes that are sent with it."""
        described: list[Described] = []
        sent: list[Array] = []
        for place in places:
            picture = place.picture
            is_new = self._kept.get(picture.name) is None
            if is_new:
                self._kept.put(picture.name, True, len(picture.data))
                sent.append(np.frombuffer(picture.data, np.uint8))
            described.append((place.start, place.num_tokens, *picture.name, is_new))
        return described, sent


@define(eq=False)
class ReceivedPictures:
    """The end in SGLang's process: keeps pictures."""

    _kept: SizedCache[PictureName, Picture] = field(factory=_make_cache)

    def take(self, described: Sequence[Described], sent: Sequence[Array]) -> tuple[PlacedPicture, ...]:
        """Return the pictures of a frame. Every frame must come here, in the order in which `pack` made them."""
        places, arrays = [], iter(sent)
        for start, num_tokens, key, media_type, is_new in described:
            name = key, media_type
            if is_new:
                picture = find_picture(next(arrays).tobytes(), media_type)
                self._kept.put(name, picture, len(picture.data))
            else:
                found = self._kept.get(name)
                assert found is not None, f"the engine takes picture {key[:12]} for sent"
                picture = found
            places.append(PlacedPicture(start=start, num_tokens=num_tokens, picture=picture))
        return tuple(places)
