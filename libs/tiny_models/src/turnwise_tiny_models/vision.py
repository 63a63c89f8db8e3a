"""Builds tiny vision-language models with their image processors, and writes their checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from PIL import Image
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from turnwise_tiny_models.model import save
from turnwise_tiny_models.tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START

MAX_PIXELS: Final = 64 * 64
"""Default limit of pixels that a model sees of a picture."""
_NUM_HEADS: Final = 4
_MERGE_SIZE: Final = 2
"""Patches on a side of one placeholder, as in the large models."""

_PROCESSORS: Final = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


@frozen(kw_only=True)
class VisionSizes:
    """
    Sizes of a tiny vision-language model.

    Attributes:
        hidden_size: width of the residual streams of text and vision.
        num_layers: transformer layers of the text model.
        patch_size: pixels on a side of a patch.
        num_vision_layers: transformer layers of the vision tower.
        initializer_range: standard deviation of the matrices; 0.1 lets so narrow a model attend from the start.
    """

    hidden_size: int = 64
    num_layers: int = 2
    patch_size: int = 4
    num_vision_layers: int = 2
    initializer_range: float = 0.02


def tiny_qwen2_5_vl(
    tokenizer: PreTrainedTokenizerFast, sizes: VisionSizes | None = None
) -> Qwen2_5_VLForConditionalGeneration:
    """
    Return a randomly initialised float32 Qwen2.5-VL whose last vision layer is in full, and others in windows of 16
    patches.

    Args:
        tokenizer: sets the vocabulary and the context length; it has the four vision tokens.
        sizes: of the model; None for the default ones.
    """
    sizes = sizes or VisionSizes()
    vision = {
        **_vision_options(sizes),
        "window_size": 4 * sizes.patch_size,
        "fullatt_block_indexes": [sizes.num_vision_layers - 1],
    }
    text = _text_options(tokenizer, sizes)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_token_ids(tokenizer), dtype="float32")
    return Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]  # transformers leaves it so


def tiny_qwen3_vl(
    tokenizer: PreTrainedTokenizerFast, sizes: VisionSizes | None = None
) -> Qwen3VLForConditionalGeneration:
    """
    Return a randomly initialised float32 Qwen3-VL whose first vision layer is also fed to the text layers.

    Args:
        tokenizer: sets the vocabulary and the context length; it has the four vision tokens.
        sizes: of the model; None for the default ones.
    """
    sizes = sizes or VisionSizes()
    vision = {**_vision_options(sizes), "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**_text_options(tokenizer, sizes), "head_dim": sizes.hidden_size // _NUM_HEADS}
    # transformers always does so for this model; vLLM asks for the entry, which the configs of the large ones have.
    text["rope_parameters"]["mrope_interleaved"] = True
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_token_ids(tokenizer), dtype="float32")
    return Qwen3VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]  # transformers leaves it so


def image_processor(
    patch_size: int = 4, max_pixels: int = MAX_PIXELS, resampling: Image.Resampling = Image.Resampling.BICUBIC
) -> Any:
    """
    Return an image processor of transformers that needs pillow, and not torchvision.

    Args:
        patch_size: of the model.
        max_pixels: larger pictures are scaled down to it.
        resampling: how they are scaled; `BOX` by a whole factor gives the means of squares.
    """
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=_MERGE_SIZE,
        temporal_patch_size=2,
        size={"shortest_edge": (_MERGE_SIZE * patch_size) ** 2, "longest_edge": max_pixels},
        resample=resampling,
    )


def save_vision(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, processor: Any = None
) -> None:
    """
    Write weights, configs, tokenizer, chat template and image processor to a folder; creates it if it is missing.

    `AutoImageProcessor` and `AutoTokenizer` load it with pillow. `AutoProcessor` does where torchvision is installed,
    which the video processors of transformers need.

    Args:
        model: a vision-language model.
        tokenizer: of the model.
        folder: to write.
        processor: its image processor; None for the one of `image_processor` with the model's patch size.
    """
    save(model, tokenizer, folder)
    processor = processor or image_processor(model.config.vision_config.patch_size)
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    options = json.loads(path.read_text(encoding="utf-8")) | {"processor_class": _PROCESSORS[model.config.model_type]}
    path.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


def _vision_options(sizes: VisionSizes) -> dict[str, Any]:
    return {
        "depth": sizes.num_vision_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_heads": _NUM_HEADS,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": _MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": sizes.hidden_size,
        "initializer_range": sizes.initializer_range,
    }


def _text_options(tokenizer: PreTrainedTokenizerFast, sizes: VisionSizes) -> dict[str, Any]:
    half = sizes.hidden_size // (2 * _NUM_HEADS)  # of the head's numbers, which time, height and width share
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": sizes.initializer_range,
    }


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    names = {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
