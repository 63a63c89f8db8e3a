"""
Pictures in vLLM's terms.

vLLM gets the arrays that this process computes, at the places that the request gives. Its own processor would find
placeholders by their id, also one that the model has sampled, and resizes with torchvision, whose last bits differ from
those of a trainer that uses pillow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from turnwise.errors import ConfigError
from turnwise.types import PlacedPicture
from turnwise_engine_support.model_directory import axes_take_turns
from turnwise_engine_support.picture_families import PictureArrays, find_family
from turnwise_engine_support.pictures import PictureReader
from turnwise_vllm_engine.config import VllmConfig

_SERVED: Final = ("qwen2_5_vl", "qwen3_vl", "internvl")
"""Model types whose arrays this module can give to vLLM."""


def serves_pictures(path: Path | None) -> bool:
    """Return whether a model directory has a vision-language model that vLLM gets pictures for."""
    family = find_family(path)
    return family is not None and family.model_type in _SERVED


def reads_pictures(config: VllmConfig, path: Path | None) -> bool:
    """Return whether the engine takes requests with pictures: not if an argument of vLLM leaves them out."""
    arguments = config.engine_args
    limits = arguments.get("limit_mm_per_prompt") or {}
    return serves_pictures(path) and not arguments.get("language_model_only") and limits.get("image") != 0


def make_reader(config: VllmConfig, path: Path | None) -> PictureReader | None:
    """Return a reader of pictures; None if the engine takes none. `ConfigError` if it cannot load the processor."""
    return PictureReader(path) if path is not None and reads_pictures(config, path) else None


def check_pictures(config: VllmConfig, path: Path) -> None:
    """Raise `ConfigError` if vLLM cannot load a vision-language model, or would not read pictures as a trainer does."""
    if not serves_pictures(path):
        return
    if find_spec("torchvision") is None:
        raise ConfigError(
            f"{str(path)!r} is a vision-language model, for which vLLM needs torchvision: install the release of"
            " torchvision that belongs to the installed torch"
        )
    if not axes_take_turns(path):
        raise ConfigError(
            f"the rope_parameters of {str(path)!r} lack mrope_interleaved, which transformers takes for granted: add"
            " it as true, or vLLM would give the parts of a picture other positions"
        )
    if config.engine_args.get("mm_processor_kwargs"):
        raise ConfigError(
            "engine_args.mm_processor_kwargs: pictures are read as the model's preprocessor_config.json says, which the"
            " trainer reads too: change it there"
        )


def picture_arguments(path: Path | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs` that a vision-language model needs."""
    if not serves_pictures(path):
        return {}
    return {
        # Without requests that have some, vLLM reserves memory for the longest video.
        "limit_mm_per_prompt": {"video": 0},
        # The arrays are normalised here, and kept here for later turns.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }


def picture_prompt(
    token_ids: list[int], places: Sequence[PlacedPicture], arrays: Sequence[PictureArrays]
) -> Mapping[str, Any]:
    """
    Return vLLM's processed input of a context with pictures. The key of a picture names it in vLLM's caches.

    Args:
        token_ids: the context, with a placeholder for each part of a picture.
        places: of the pictures, in their order.
        arrays: of these pictures.
    """
    import torch
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    def item_of(place: PlacedPicture, picture: PictureArrays) -> Any:
        sizes = torch.tensor([len(picture.pixel_values)])
        inputs = dict(picture.inputs)
        fields = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in inputs}
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", sizes)
        if "image_grid_thw" not in inputs:
            # Of an InternVL, vLLM asks for the tiles of each picture and for the placeholder.
            inputs |= {"image_num_patches": sizes, "image_token_id": torch.tensor(token_ids[place.start])}
            fields["image_num_patches"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            fields["image_token_id"] = MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True)
        return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"][0]

    prompt: Mapping[str, object] = mm_input(
        token_ids,
        {"image": [item_of(*each) for each in zip(places, arrays, strict=True)]},
        {"image": [each.picture.key for each in places]},
        {"image": [PlaceholderRange(offset=each.start, length=each.num_tokens) for each in places]},
    )
    return prompt
