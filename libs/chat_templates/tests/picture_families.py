"""Families of vision-language models: directories of small models with the real processors, without a download."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from turnwise_testing.inputs.tokenizers import SPECIAL_TOKENS, byte_tokenizer
from turnwise_testing.inputs.vision import (
    IDEFICS_TOKENS,
    INTERN_VL,
    QWEN_2_5_VL,
    save_gemma,
    save_idefics,
    save_intern,
    save_qwen,
    save_with_tokens,
)

_CHAT = INTERN_VL.replace("<IMG_CONTEXT>\\n", "IMAGE")
"""ChatML, with the family's token in place of `IMAGE`."""
_SQUARE = {"height": 16, "width": 16}
_FULL = {"vision_feature_select_strategy": "full"}
_CLIP = {"patch_size": 8, "num_additional_image_tokens": 0} | _FULL
_CUTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_SOUND = {"audio_token": "<audio>", "boa_token": "<audio_start>", "eoa_token": "<audio_end>"}
_FRAME = {"boi_token": "<image_start>", "eoi_token": "<image_end>"}


def save_family(
    folder: Path,
    name: str,
    token: str,
    *,
    images: str = "",
    marks: tuple[str, ...] = (),
    named: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    image_options: Mapping[str, Any] | None = None,
) -> Path:
    """
    Write a small model whose turns have the tags of ChatML.

    Args:
        folder: to write to.
        name: the processor's class without the end `Processor`.
        token: which the template writes for a picture.
        images: class of the image processor; without one, it has the name of the processor.
        marks: further special tokens.
        named: special tokens that the processor asks the tokenizer for, by name.
        options: of the processor.
        image_options: of the image processor.
    """
    special = dict.fromkeys((*SPECIAL_TOKENS, token, *marks, *(named or {}).values()))
    save_with_tokens(folder, byte_tokenizer(_CHAT.replace("IMAGE", token), tuple(special)), named or {})
    files = {
        "preprocessor_config.json": {
            "image_processor_type": images or f"{name}ImageProcessor",
            **(image_options or {}),
        },
        "processor_config.json": {"processor_class": f"{name}Processor", **(options or {})},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


@frozen
class Family:
    """A family: how to write the directory of a small model, and the tokens of its pictures and turns."""

    save: Callable[[Path], Path]
    has_tools: bool = False
    placeholder: str = "<|image_pad|>"
    end: str = "<|im_end|>"
    lead: str = ""
    has_tiles: bool = False
    needs: str = ""


_PIXTRAL_MARKS = ("[IMG_BREAK]", "[IMG_END]")
_PIXTRAL_IMAGES = {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
_LLAMA_MARKS = ("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
_COHERE = {
    **{"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"},
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_LFM_MARKS = (
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
_LFM_IMAGES = {
    **{"tile_size": 32, "encoder_patch_size": 4, "min_tiles": 2, "max_tiles": 4, "size": {"height": 32, "width": 32}},
    **{"min_image_tokens": 4, "max_image_tokens": 16, "return_row_col_info": True},
}
_AYA_MARKS = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 5)))
_AYA_OPTIONS = {
    **{"patch_size": 4, "img_size": 16, "downsample_factor": 2, "image_token": "<image>"},
    **{"start_of_image_token": "<|START_OF_IMG|>", "end_of_image_token": "<|END_OF_IMG|>"},
    **{"img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"},
}
FAMILIES = {
    "qwen2.5-vl": Family(lambda folder: save_qwen(folder, QWEN_2_5_VL, "Qwen2_5_VLProcessor")),
    "qwen3-vl": Family(save_qwen, has_tools=True),
    "internvl": Family(save_intern, placeholder="<IMG_CONTEXT>"),
    "gemma3": Family(save_gemma, placeholder="<image_soft_token>", end="<end_of_turn>"),
    "idefics3": Family(save_idefics, placeholder="<image>", end="<end_of_utterance>", lead=" ", has_tiles=True),
    "smolvlm": Family(
        partial(
            save_family,
            name="SmolVLM",
            token="<image>",
            marks=IDEFICS_TOKENS,
            options={"image_seq_len": 3},
            image_options={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ),
        placeholder="<image>",
        has_tiles=True,
        needs="num2words",
    ),
    "llama4": Family(
        partial(
            save_family,
            name="Llama4",
            token="<|image|>",
            marks=_LLAMA_MARKS,
            options={"patch_size": 4},
            image_options={"size": _SQUARE, "max_patches": 4},
        ),
        placeholder="<|patch|>",
        has_tiles=True,
        needs="torchvision",
    ),
    "pixtral": Family(
        partial(
            save_family,
            name="Pixtral",
            token="[IMG]",
            marks=_PIXTRAL_MARKS,
            options={"patch_size": 8, "spatial_merge_size": 2},
            image_options=_PIXTRAL_IMAGES,
        ),
        placeholder="[IMG]",
        has_tiles=True,
        needs="torchvision",
    ),
    "llava": Family(
        partial(
            save_family,
            name="Llava",
            images="CLIPImageProcessor",
            token="<image>",
            options=_CLIP,
            image_options={"size": {"shortest_edge": 16}, "crop_size": _SQUARE},
        ),
        placeholder="<image>",
    ),
    "llava-next": Family(
        partial(
            save_family,
            name="LlavaNext",
            token="<image>",
            options=_CLIP,
            image_options={"size": {"shortest_edge": 16}, "crop_size": _SQUARE} | _CUTS,
        ),
        placeholder="<image>",
    ),
    "glm4v": Family(
        partial(
            save_family,
            name="Glm4v",
            token="<|image|>",
            marks=("<|begin_of_video|>", "<|end_of_video|>"),
            image_options={"size": {"shortest_edge": 1024, "longest_edge": 20_000}, "patch_size": 4},
        ),
        placeholder="<|image|>",
    ),
    "gemma4": Family(
        partial(
            save_family,
            name="Gemma4",
            token="<|image|>",
            named={"image_token": "<|image|>"} | _SOUND | _FRAME,
            image_options={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ),
        placeholder="<|image|>",
        needs="torchvision",
    ),
    "cohere2-vision": Family(
        partial(
            save_family,
            name="Cohere2Vision",
            token="<|IMG_PATCH|>",
            named=_COHERE,
            image_options={"size": _SQUARE, "patch_size": 2, "max_patches": 4},
        ),
        placeholder="<|IMG_PATCH|>",
        has_tiles=True,
        needs="torchvision",
    ),
    "lfm2-vl": Family(
        partial(save_family, name="Lfm2Vl", token="<image>", marks=_LFM_MARKS, image_options=_LFM_IMAGES),
        placeholder="<image>",
        has_tiles=True,
        needs="torchvision",
    ),
    "aya": Family(
        partial(
            save_family,
            name="AyaVision",
            images="GotOcr2ImageProcessor",
            token="<image>",
            marks=_AYA_MARKS,
            options=_AYA_OPTIONS,
            image_options={"size": _SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        ),
        placeholder="<|IMG_PATCH|>",
        has_tiles=True,
    ),
}
"""Families whose pictures can be appended."""

REFUSED_FAMILIES = {
    "llava-onevision": (
        partial(
            save_family,
            name="LlavaOnevision",
            token="<image>",
            options={"num_image_tokens": 4} | _FULL,
            image_options={"size": _SQUARE} | _CUTS,
        ),
        "otherwise than each alone",
    ),
    "paligemma": (
        partial(
            save_family,
            name="PaliGemma",
            images="SiglipImageProcessor",
            token="<image>",
            named={"image_token": "<image>", "bos_token": "<bos>"},
            image_options={"size": _SQUARE, "image_seq_length": 4},
        ),
        "changes the text beside them",
    ),
    "gemma3n": (
        partial(
            save_family,
            name="Gemma3n",
            images="SiglipImageProcessor",
            token="<image>",
            named={"image_token": "<image>"} | _SOUND | _FRAME,
            options={"image_seq_length": 4},
            image_options={"size": _SQUARE},
        ),
        "does not tell the text of a picture",
    ),
    "idefics2": (
        partial(
            save_family,
            name="Idefics2",
            token="<image>",
            marks=("<fake_token_around_image>", "<end_of_utterance>"),
        ),
        "does not tell the text of a picture",
    ),
    "mllama": (
        partial(
            save_family,
            name="Mllama",
            token="<|image|>",
            image_options={"size": _SQUARE},
        ),
        "does not tell the text of a picture",
    ),
}
"""Families whose pictures cannot be appended, and a piece of the reason."""


def family_params() -> list[Any]:
    """Return the names of families as parameters; the ones that need torchvision run in vLLM's environment."""
    return [
        pytest.param(name, marks=[pytest.mark.vllm] if family.needs == "torchvision" else [])
        for name, family in FAMILIES.items()
    ]


def require_packages(family: Family) -> None:
    """Skip the test if the processor's class needs a package that is not installed."""
    if family.needs and find_spec(family.needs) is None:
        pytest.skip(f"{family.needs} is not installed")
