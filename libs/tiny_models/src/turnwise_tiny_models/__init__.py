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
    "IGNORE_INDEX",
    "TURN_END",
    "TURN_START",
    "Batch",
    "Demonstration",
    "FitConfig",
    "Training",
    "batched",
    "byte_level_tokenizer",
    "fit",
    "pad_demonstrations",
    "save",
    "tiny_qwen3",
    "train_command",
]
