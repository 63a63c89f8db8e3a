"""Tiny language models that learn from demonstrations on a CPU: tokenizer, model, training, folder, command."""

from turnwise_tiny_models.command import train_command
from turnwise_tiny_models.fitting import IGNORED, Batch, Demonstration, FitConfig, Recipe, batched, fit, padded
from turnwise_tiny_models.model import save, tiny_qwen3
from turnwise_tiny_models.tokenizer import (
    CHATML,
    CONTEXT_LENGTH,
    END_OF_TEXT,
    TURN_END,
    TURN_START,
    byte_level_tokenizer,
)

__all__ = [
    "CHATML",
    "CONTEXT_LENGTH",
    "END_OF_TEXT",
    "IGNORED",
    "TURN_END",
    "TURN_START",
    "Batch",
    "Demonstration",
    "FitConfig",
    "Recipe",
    "batched",
    "byte_level_tokenizer",
    "fit",
    "padded",
    "save",
    "tiny_qwen3",
    "train_command",
]
