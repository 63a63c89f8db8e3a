"""A tiny language model with its tasks, its tool and its reward: turnwise runs end to end with no download."""

from pathlib import Path

__all__ = ["model_dir"]


def model_dir() -> Path:
    """The folder of the shipped model, as `from_pretrained` and every engine take it."""
    return Path(__file__).parent / "model"
