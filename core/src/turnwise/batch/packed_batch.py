"""
Packed batches: the real tokens of many rows end to end, in memory and in files.

Their size grows with the number of real tokens, whatever the longest row is. `turnwise.batch.rollout_batch` pads them.

Shapes: B rows, one per trajectory; N real tokens of all rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np
from attrs import field, frozen

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns, make_rows
from turnwise.batch.padding import Padding, Widths
from turnwise.batch.rows import build_rows
from turnwise.errors import DataError, TrajectoryError
from turnwise.files import atomic_write
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from torch import Tensor

_METADATA_KEY: Final = "turnwise.packed_batch"
_TENSORS: Final = (*COLUMNS, "cu_seqlens", "prompt_lens")


@frozen(kw_only=True, eq=False, repr=False)
class PackedBatch(BatchColumns):
    """
    Rows end to end; row b is ``cu_seqlens[b]:cu_seqlens[b + 1]``, its prompt first. A row may have no tokens.

    All columns of tokens and of response tokens are (N,); those of response tokens hold their pad value on prompts.
    `block_start` and `path_start` count within the row, as in the `Trajectory`.

    Attributes:
        cu_seqlens: (B + 1,) int32, where rows start and end.
        prompt_lens: (B,) int64.
        field_alignment: what the values of each field belong to. Fields are (B,) or (N, ...); those of response tokens
            hold 0 on prompts.
    """

    cu_seqlens: Tensor
    prompt_lens: Tensor
    field_alignment: Mapping[str, Alignment] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Raise `TrajectoryError` when the shapes of tensors disagree."""
        sizes = {"row": len(self), "response": len(self.input_ids), "token": len(self.input_ids)}
        alignments = {name: column.alignment for name, column in COLUMNS.items()}
        for name, alignment in (alignments | {"prompt_lens": "row"}).items():
            if getattr(self, name).shape != (sizes[alignment],):
                raise TrajectoryError(f"{name} has shape {list(getattr(self, name).shape)}, not [{sizes[alignment]}]")
        if len(self.cu_seqlens) != len(self) + 1 or int(self.cu_seqlens[-1]) != sizes["token"]:
            raise TrajectoryError(f"cu_seqlens does not bound {len(self)} rows of {sizes['token']} tokens")

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens

    def save(self, path: str | Path, **widths: Unpack[Widths]) -> None:
        """
        Write a safetensors file, whole or not at all, with everything that is no tensor as JSON in its metadata.

        `widths` are the numbers of columns that `RolloutBatch.load` pads to; without them the longest rows decide.
        """
        from safetensors.torch import save_file

        metadata = {
            "widths": widths,
            "pad_token_id": self.pad_token_id,
            "num_rows": len(self),
            "rows": {name: self.column(name) for name in ROW_NAMES},
            "field_alignment": dict(self.field_alignment),
        }
        tensors = {name: getattr(self, name) for name in _TENSORS} | dict(self.fields)
        with atomic_write(path) as partial:
            partial.touch()
            mode = partial.stat().st_mode
            save_file(_separate(tensors), partial, {_METADATA_KEY: json.dumps(metadata)})
            partial.chmod(mode)  # safetensors makes a private file, whatever the umask

    @classmethod
    def load(cls, path: str | Path) -> PackedBatch:
        """Read a file that `save` wrote; `DataError` when it is missing or holds no batch."""
        return read_file(path)[0]


def read_file(path: str | Path) -> tuple[PackedBatch, Widths]:
    """Return the batch in a file, and the widths that it was saved with; errors as in `PackedBatch.load`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        columns = {name: tensors.pop(name) for name in _TENSORS}
        packed = PackedBatch(
            **columns,
            rows=make_rows(metadata["rows"], metadata["num_rows"]),
            pad_token_id=metadata["pad_token_id"],
            fields={name: tensors[name] for name in metadata["field_alignment"]},
            field_alignment=metadata["field_alignment"],
        )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a saved batch: {type(error).__name__}: {error}") from error
    return packed, metadata["widths"]


def collate_packed(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Make a packed batch of episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories.
    """
    import torch

    rows = build_rows(results)
    padding = Padding.fitting(rows.prompt_lens, rows.response_lens)
    columns: dict[str, Any] = {
        name: torch.from_numpy(getattr(rows, name))
        if column.alignment == "row"
        else padding.pack_rows(rows.columns[name], column.alignment, column.dtype, column.fill)
        for name, column in COLUMNS.items()
    }
    prompt_lens = np.array(rows.prompt_lens, np.int64)
    ends = np.cumsum(prompt_lens + np.array(rows.response_lens, np.int64))
    return PackedBatch(
        **columns,
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        prompt_lens=torch.from_numpy(prompt_lens),
        rows=rows.rows,
        pad_token_id=pad_token_id,
    )


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, because the format refuses others; most are not copied."""
    separate: dict[str, Any] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    return separate
