"""Writes a model in the format of `from_pretrained`."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from turnwise.files import share_weights

_COPIED: Final = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files of a tokenizer."""
_RECORDS: Final = ("sft.json", "log.json")
"""Files that `turnwise sft` writes beside its model, with paths of its machine."""
_OF_MODEL: Final = ("config.json", "generation_config.json")


def write_model(model: Any, weights: Mapping[str, Tensor], source: Path, folder: Path) -> None:
    """
    Write weights as safetensors, with the model's config and the tokenizer of the initial model.

    Args:
        model: a causal model of transformers.
        weights: its whole state dict.
        source: directory of the initial model.
        folder: where to write.
    """
    model.save_pretrained(folder, state_dict=weights)
    copy_tokenizer(source, folder, also=_OF_MODEL)
    share_weights(folder)


def copy_tokenizer(source: Path, folder: Path, also: Sequence[str] = ()) -> None:
    """Copy the small files of a model's directory that a folder lacks; the model's own config only if in `also`."""
    for file in sorted(source.iterdir()):
        is_weights = file.name.endswith(".safetensors.index.json")
        if file.name in _RECORDS or (file.name in _OF_MODEL and file.name not in also):
            continue
        if not (folder / file.name).exists() and file.suffix in _COPIED and not is_weights:
            (folder / file.name).write_bytes(file.read_bytes())
