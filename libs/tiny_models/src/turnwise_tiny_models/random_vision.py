"""Writes tiny vision-language models with random weights, for tests that need a model which sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

from turnwise_tiny_models.tokenizer import CHATML, VISION_TOKENS, byte_level_tokenizer
from turnwise_tiny_models.vision import VisionSizes, save_vision, tiny_qwen2_5_vl, tiny_qwen3_vl

VisionKind = Literal["qwen2_5_vl", "qwen3_vl"]
_MODELS: Final = {"qwen2_5_vl": tiny_qwen2_5_vl, "qwen3_vl": tiny_qwen3_vl}


def save_random_vision(
    kind: VisionKind,
    folder: Path,
    sizes: VisionSizes | None = None,
    *,
    processor: object = None,
    text: str = "a red circle",
    chat_template: str = CHATML,
) -> Path:
    """
    Write a vision-language model whose answers depend on pictures, and return its folder.

    The weights are the same for the same model. Matrices are so large that no distribution of its next id is even.

    Args:
        kind: the family.
        folder: to write.
        sizes: of the model; None for the default ones.
        processor: its image processor; None for the one of `image_processor`.
        text: that its tokenizer has learned to write with few tokens.
        chat_template: Jinja source.
    """
    tokenizer = byte_level_tokenizer([text] * 3, 300, special_tokens=VISION_TOKENS, chat_template=chat_template)
    model: PreTrainedModel = draw_weights(_MODELS[kind](tokenizer, sizes))
    save_vision(model, tokenizer, folder, processor)
    return folder


def draw_weights(model: Any) -> Any:
    """Draw the matrices of a model, and the vector of a line's end, the same each time; return the model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or name.endswith("image_newline"):
                scale = 0.4 if name.startswith("lm_head") else 0.12
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model
