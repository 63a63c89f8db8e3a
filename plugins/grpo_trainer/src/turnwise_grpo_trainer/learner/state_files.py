"""Writes the tensors of a checkpoint from the memory that they are in, for `torch.distributed.checkpoint`."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from turnwise.files import share_weights


class StateWriter(HuggingFaceStorageWriter):
    """
    A writer of sharded safetensors that copies nothing on a CPU.

    The writer of torch, whose files these are, has each file in memory two or three times.

    Args:
        folder: where to write.
        numbers: of the file of each tensor, from 1, by the name of the tensor.
    """

    def __init__(self, folder: Path, numbers: dict[str, int]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
        self._folder = folder
        self._numbers = numbers

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this process, file after file; see `HuggingFaceStorageReader` for the metadata."""
        files: dict[int, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self._numbers[item.index.fqn], []).append(item)
        for number, items in files.items():
            name = _gen_file_name(number, max(self._numbers.values()), plan.storage_data["shard_index"])
            tensors = {item.index.fqn: _on_host(planner.resolve_data(item)) for item in items}
            offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets} for item in items}
            save_file(tensors, self._folder / name, metadata={CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"})
        share_weights(self._folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # only a writer that joins the shards reads results
        return done


def _on_host(value: Any) -> Tensor:
    tensor: Tensor = value.detach().cpu().contiguous()  # the tensor itself on a CPU
    return tensor
