"""Files of batches: safetensors, with everything that is no tensor as JSON in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from turnwise.errors import DataError
from turnwise.files import atomic_write
from turnwise.types import JsonObject

_METADATA_KEY: Final = "turnwise.rollout_batch"


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: JsonObject) -> None:
    """Write tensors and JSON metadata to a safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    # The format refuses tensors that share memory.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with atomic_write(path) as partial:
        save_file(copies, partial, {_METADATA_KEY: json.dumps(metadata)})


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the metadata that `write_tensors` wrote; `DataError` names a file that is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, Any] = json.loads((file.metadata() or {})[_METADATA_KEY])
            return {name: file.get_tensor(name) for name in list(file.keys())}, metadata
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise bad_file(path, error) from error


def bad_file(path: str | Path, error: Exception) -> DataError:
    """Return the error for a file that holds no batch."""
    return DataError(f"{path}: not a saved batch: {type(error).__name__}: {error}")
