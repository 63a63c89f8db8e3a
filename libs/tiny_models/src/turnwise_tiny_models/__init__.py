"""Trains tiny language models on demonstrations, on a CPU: tokenizer, model, training loop, checkpoint and command."""

from turnwise_tiny_models.command import train_command
from turnwise_tiny_models.fitting import (
    IGNORE_INDEX,
    Batch,
    Demonstration,
    FitConfig,
    Training,
    batched,
    fit,
    pad_demonstrations,
)
from turnwise_tiny_models.model import save, tiny_qwen3
from turnwise_tiny_models.random_tiles import TileKind, save_random_tiles
from turnwise_tiny_models.random_vision import VisionKind, save_random_vision
from turnwise_tiny_models.tokenizer import (
    CHATML,
    CONTEXT_LENGTH,
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    TURN_START,
    VIDEO_PAD,
    VISION_CHATML,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    byte_level_tokenizer,
)
from turnwise_tiny_models.vision import VisionSizes, image_processor, save_vision, tiny_qwen2_5_vl, tiny_qwen3_vl

__all__ = [
    "CHATML",
    "CONTEXT_LENGTH",
    "END_OF_TEXT",
    "IGNORE_INDEX",
    "IMAGE_PAD",
    "TURN_END",
    "TURN_START",
    "VIDEO_PAD",
    "VISION_CHATML",
    "VISION_END",
    "VISION_START",
    "VISION_TOKENS",
    "Batch",
    "Demonstration",
    "FitConfig",
    "TileKind",
    "Training",
    "VisionKind",
    "VisionSizes",
    "batched",
    "byte_level_tokenizer",
    "fit",
    "image_processor",
    "pad_demonstrations",
    "save",
    "save_random_tiles",
    "save_random_vision",
    "save_vision",
    "tiny_qwen2_5_vl",
    "tiny_qwen3",
    "tiny_qwen3_vl",
    "train_command",
]
