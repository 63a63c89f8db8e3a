"""
Packed batches: the real tokens of many rows end to end, in memory and in files.

Their size grows with the number of real tokens, whatever the longest row is. `turnwise.batch.rollout_batch` pads them.

Shapes: B rows, one per trajectory; N real tokens of all rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import numpy as np
from attrs import evolve, field, frozen

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns, Column, make_rows
from turnwise.batch.padding import Padding, Widths, pack_column
from turnwise.batch.rows import build_rows
from turnwise.errors import DataError, DuplicateNameError, PluginError, TrajectoryError
from turnwise.files import atomic_write, raise_disk_error
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from torch import Tensor

_METADATA_KEY: Final = "turnwise.packed_batch"
_PADDED_NAMES: Final = frozenset(
    {
        *("attention_mask", "prompt_length", "response_length", "prompts", "responses", "visibility", "select"),
        *("packed", "from_packed", "to_tensordict", "from_tensordict"),
    }
)
"""Attributes of padded batches alone, which no field may hide when the batch is padded."""
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
        sizes = {"row": len(self), "response": len(self.input_ids), "token": len(self.input_ids)}
        alignments = {name: column.alignment for name, column in COLUMNS.items()}
        for name, alignment in (alignments | {"prompt_lens": "row"}).items():
            if getattr(self, name).shape != (sizes[alignment],):
                raise TrajectoryError(f"{name} has shape {list(getattr(self, name).shape)}, not [{sizes[alignment]}]")
        ends = self.cu_seqlens.tolist()
        if len(ends) != len(self) + 1 or (ends[0], ends[-1]) != (0, sizes["token"]) or self._has_negative_lens():
            raise TrajectoryError(f"cu_seqlens does not bound {len(self)} rows of {sizes['token']} tokens")

    def _has_negative_lens(self) -> bool:
        return any(bool((lens < 0).any()) for lens in (self.prompt_lens, self.response_lens))

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens

    def split(self, column: Tensor) -> tuple[Tensor, ...]:
        """Return views of an (N, ...) column, one for each row: its prompt, then its response."""
        return column.split_with_sizes(self.cu_seqlens.diff().tolist())

    def with_fields(self, new: Mapping[str, Tensor | Sequence[Tensor]]) -> PackedBatch:
        """
        Return a batch with additional fields.

        Args:
            new: name to a (B,) tensor; or to a sequence of B tensors, one for each row, with a value for each token of
                the row or for each of its response tokens.

        Raises:
            DuplicateNameError: the batch, a `BatchRow` or another field has the name.
            PluginError: the values do not fit the rows.
        """
        fields, alignments = dict(self.fields), dict(self.field_alignment)
        for name, values in new.items():
            if name in fields or name in _PADDED_NAMES or name in ROW_NAMES or hasattr(self, name):
                raise DuplicateNameError(f"field {name!r}: the batch already has an attribute or a field of that name")
            fields[name], alignments[name] = self._align(name, values)
        return evolve(self, fields=fields, field_alignment=alignments)

    def _align(self, name: str, values: Tensor | Sequence[Tensor]) -> tuple[Tensor, Alignment]:
        """Return a field as it is kept, and the alignment of its values."""
        import torch

        if isinstance(values, torch.Tensor):
            if values.shape == (len(self),):
                return values, "row"
            raise PluginError(f"field {name!r} has shape {tuple(values.shape)}, expected ({len(self)},)")
        lens = [each.shape[0] if each.ndim else -1 for each in values]
        prompt_lens = self.prompt_lens.tolist()
        if lens == self.response_lens.tolist():
            rows = [(each.new_zeros((n, *each.shape[1:])), each) for n, each in zip(prompt_lens, values, strict=True)]
            return torch.cat([part for row in rows for part in row] or [torch.zeros(0)]), "response"
        if lens == self.cu_seqlens.diff().tolist():
            return torch.cat(list(values)), "token"
        wanted = f"{len(self)}, with a value for each token of a row or for each of its response tokens"
        raise PluginError(f"field {name!r} has {len(lens)} tensors of lengths {lens[:4]}, expected {wanted}")

    def save(self, path: str | Path, **widths: Unpack[Widths]) -> None:
        """
        Write a safetensors file, whole or not at all, with everything that is no tensor as JSON in its metadata.

        `widths` are the numbers of columns that `RolloutBatch.load` pads to; without them the longest rows decide.
        Raises `OSError` when the disk takes no more.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        metadata = {
            "widths": widths,
            "pad_token_id": self.pad_token_id,
            "num_rows": len(self),
            "rows": {name: self.column(name) for name in ROW_NAMES},
            "field_alignment": dict(self.field_alignment),
        }
        # A batch without blocks has no layout in its file.
        empty = {name for name, column in COLUMNS.items() if column.is_index and not getattr(self, name).any()}
        tensors = {name: getattr(self, name) for name in _TENSORS if name not in empty} | dict(self.fields)
        with atomic_write(path) as partial:
            partial.touch()
            mode = partial.stat().st_mode
            try:
                save_file(_separate(tensors), partial, {_METADATA_KEY: json.dumps(metadata)})
            except SafetensorError as error:
                raise_disk_error(error)
                raise
            partial.chmod(mode)  # safetensors makes a private file, whatever the umask

    @classmethod
    def load(cls, path: str | Path) -> PackedBatch:
        """Read a file that `save` wrote; `DataError` when it is missing or holds no batch."""
        return read_file(path)[0]


def read_file(path: str | Path) -> tuple[PackedBatch, Widths]:
    """Return the batch in a file, and the widths that it was saved with; errors as in `PackedBatch.load`."""
    import torch
    from safetensors import SafetensorError, safe_open

    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path}: is no regular file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        no_blocks = tensors["input_ids"].new_zeros(1, dtype=torch.int32).expand(len(tensors["input_ids"]))
        layout = {name: no_blocks for name, column in COLUMNS.items() if column.is_index and name not in tensors}
        columns = layout | {name: tensors.pop(name) for name in _TENSORS if name not in layout}
        _check_columns(columns)
        packed = PackedBatch(
            **columns,
            rows=make_rows(metadata["rows"], metadata["num_rows"]),
            pad_token_id=metadata["pad_token_id"],
            fields={name: tensors[name] for name in metadata["field_alignment"]},
            field_alignment=metadata["field_alignment"],
        )
        widths = {name: metadata["widths"][name] for name in Widths.__annotations__ if name in metadata["widths"]}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a saved batch: {type(error).__name__}: {error}") from error
    return packed, cast(Widths, widths)


def _check_columns(columns: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` that names the first column of a file with another type, or with a value out of range."""
    import torch

    wanted = {**COLUMNS, "cu_seqlens": Column(np.int32, "row"), "prompt_lens": Column(np.int64, "row", low=0)}
    for name, column in wanted.items():
        values = columns[name]
        dtype = torch.from_numpy(np.empty(0, column.packed_dtype)).dtype
        if values.dtype != dtype:
            raise ValueError(f"column {name!r} has type {values.dtype}, expected {dtype}")
        if values.numel() and column.low is not None:
            low, high = (each.item() for each in values.aminmax())
            if not (column.low <= low and high <= column.high):  # also of nan
                bounds = f"{column.low:g} to {column.high:g}"
                raise ValueError(f"column {name!r} has values from {low} to {high}, expected {bounds}")


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
        else pack_column(
            padding.pack_rows(rows.columns[name], column.alignment, column.packed_dtype, column.fill), column
        )
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
