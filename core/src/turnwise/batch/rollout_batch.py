"""
Padded batches: the columns of many rows as rectangles.

Every real token is the same in all forms; only pads come and go. A batch depends on the episodes and their order
alone, never on the workers that ran them.

Shapes: B rows, one per trajectory; P prompt columns; R response columns; T = P + R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import DTypeLike
from torch import Tensor

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns
from turnwise.batch.packed_arrays import field_alignment, field_fills
from turnwise.batch.packed_batch import PackedBatch, count_positions, no_layout
from turnwise.batch.padding import Padding, Widths, as_array, find_alignment
from turnwise.batch.rows import Rows, build_rows
from turnwise.errors import DuplicateNameError, TrajectoryError
from turnwise.record.result import EpisodeResult

_TENSORS: Final = (*COLUMNS, "attention_mask")
_INDEX_COLUMNS: Final = tuple(name for name, column in COLUMNS.items() if column.is_index)


@frozen(kw_only=True, eq=False, repr=False)
class RolloutBatch(BatchColumns):
    """
    Padded rows: prompts end, and responses start, at column P.

    Columns of tokens are (B, T), columns of response tokens are (B, R). Pads hold `pad_token_id` in `input_ids`, -1 in
    `weight_versions`, and 0 everywhere else. `block_start` and `path_start` count columns, so that
    ``visible(q, k) = k <= q and (k < block_start[q] or k >= path_start[q])`` holds for columns q, k of a row where
    `attention_mask` is 1 at both; `visibility` computes the same for all of them.

    Types are narrow, as in a packed batch; `as_int64` widens ids, positions and masks.

    Attributes:
        position_ids: (B, T) int32.
        attention_mask: (B, T) uint8, 1 on real tokens.
        prompt_length: P.
    """

    position_ids: Tensor
    attention_mask: Tensor
    prompt_length: int

    def __attrs_post_init__(self) -> None:
        widths = {"token": [self.input_ids.shape[-1]], "response": [self.response_length], "row": []}
        expected = {name: [len(self), *widths[column.alignment]] for name, column in COLUMNS.items()}
        for name, shape in (expected | {"attention_mask": expected["input_ids"]}).items():
            if list(getattr(self, name).shape) != shape:
                raise TrajectoryError(f"{name} has shape {list(getattr(self, name).shape)}, expected {shape}")

    @property
    def response_length(self) -> int:
        """R."""
        return self.input_ids.shape[-1] - self.prompt_length

    @property
    def prompts(self) -> Tensor:
        """(B, P), left-padded: a view of `input_ids`."""
        return self.input_ids[:, : self.prompt_length]

    @property
    def responses(self) -> Tensor:
        """(B, R), right-padded: a view of `input_ids`."""
        return self.input_ids[:, self.prompt_length :]

    @property
    def prompt_lens(self) -> Tensor:
        """(B,) int64: prompt tokens of each row."""
        return self.attention_mask[:, : self.prompt_length].sum(1)

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.attention_mask[:, self.prompt_length :].sum(1)

    def visibility(self) -> Tensor:
        """
        Return (B, T, T) bool: whether the token at a column (second axis) sees the one at another (third axis).

        Pads see nothing and are not seen. It takes B * T * T bytes: `select` a few rows first.
        """
        key = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        outside = (key < self.block_start[:, :, None]) | (key >= self.path_start[:, :, None])
        real = self.attention_mask.bool()
        return outside & (key <= key[:, None]) & real[:, :, None] & real[:, None, :]

    def with_fields(self, new: Mapping[str, Tensor]) -> RolloutBatch:
        """
        Return a batch with additional fields.

        Args:
            new: name to a tensor of shape (B,), (B, R, ...) or (B, T, ...), one value for each row, response token or
                token. When padding changes, its pads hold 0.

        Raises:
            DuplicateNameError: the batch, a `BatchRow` or another field has the name.
            PluginError: a shape is none of these.
        """
        for name in new:
            if name in _TAKEN_NAMES or name in self.fields:
                raise DuplicateNameError(f"field {name!r}: the batch already has an attribute or a field of that name")
        found = {name: self._alignment(name, tensor) for name, tensor in new.items()}
        return evolve(self, fields={**self.fields, **new}, field_alignment={**self.field_alignment, **found})

    def select(self, rows: slice | Sequence[int] | Tensor) -> RolloutBatch:
        """Return some rows in the given order, with their padding; a (B,) bool tensor selects its True rows."""
        chosen = rows if isinstance(rows, slice | Tensor) else torch.tensor(list(rows), dtype=torch.int64)
        index = torch.arange(len(self))[chosen]
        return evolve(
            self,
            **{name: getattr(self, name)[index] for name in _TENSORS},
            rows=tuple(self.rows[i] for i in index.tolist()),
            fields={name: tensor[index] for name, tensor in self.fields.items()},
        )

    def as_int64(self) -> RolloutBatch:
        """
        Return the batch with ids, positions and masks as int64, the type of indices and of most trainers' batches.

        The tensors of tokens then take 2 to 8 times the memory.
        """
        names = [*(name for name, column in COLUMNS.items() if column.is_widened), "attention_mask"]
        return evolve(self, **{name: getattr(self, name).long() for name in names})

    def packed(self) -> PackedBatch:
        """Return the real tokens end to end; `from_packed` is the inverse."""
        prompt_lens, lens = self.prompt_lens, self.attention_mask.sum(1)
        padding = Padding(
            prompt_lens=prompt_lens.tolist(),
            response_lens=self.response_lens.tolist(),
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )
        padded = self.tensors
        padded |= _shift_indices(padded, prompt_lens - self.prompt_length)
        has_blocks = _any(self.path_start)
        columns: dict[str, Any] = {
            name: padding.unpad(padded[name], column.alignment).to(_torch_type(column.dtype))
            for name, column in COLUMNS.items()
            if has_blocks or not column.is_index
        }
        cu_seqlens = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
        positions = columns.pop("position_ids")
        plain = not has_blocks and torch.equal(positions, count_positions(cu_seqlens))
        alignment = {name: self._alignment(name, tensor) for name, tensor in self.fields.items()}
        return PackedBatch(
            **columns,
            **({} if has_blocks else no_layout(len(positions))),
            block_positions=None if plain else positions,
            cu_seqlens=cu_seqlens,
            prompt_lens=prompt_lens,
            rows=self.rows,
            pad_token_id=self.pad_token_id,
            fields={name: padding.unpad(tensor, alignment[name]) for name, tensor in self.fields.items()},
            field_alignment=alignment,
            field_fills=self.field_fills,
        )

    @classmethod
    def from_packed(cls, packed: PackedBatch, **widths: Unpack[Widths]) -> RolloutBatch:
        """Pad a packed batch; `TrajectoryError` when a row does not fit."""
        padding = Padding.fitting(packed.prompt_lens.tolist(), packed.response_lens.tolist(), **widths)
        has_blocks = packed.block_positions is not None
        padded = {
            name: padding.pad(tensor, COLUMNS[name].alignment, _fill(name, packed.pad_token_id))
            for name, tensor in packed.tensors.items()
            if has_blocks or not COLUMNS[name].is_index
        }
        fills = packed.field_fills
        fields = {
            name: padding.pad(tensor, packed.field_alignment[name], fills.get(name, 0))
            for name, tensor in packed.fields.items()
        }
        others: dict[str, object] = {"rows": packed.rows, "pad_token_id": packed.pad_token_id}
        others |= {"field_fills": fills, "field_alignment": packed.field_alignment}
        return _make_batch(padded, padding, fields=fields, **others)

    @classmethod
    def from_rows(cls, rows: Rows, *, pad_token_id: int, **widths: Unpack[Widths]) -> RolloutBatch:
        """Pad rows; `TrajectoryError` when one does not fit."""
        padding = Padding.fitting(rows.prompt_lens, rows.response_lens, **widths)
        columns = dict(rows.columns)
        if "position_ids" not in columns:
            lens = zip(rows.prompt_lens, rows.response_lens, strict=True)
            columns["position_ids"] = [np.arange(prompt + response, dtype=np.int32) for prompt, response in lens]
        padded = {
            name: padding.pad_rows(
                columns[name], COLUMNS[name].alignment, COLUMNS[name].dtype, _fill(name, pad_token_id)
            )
            for name in columns
        }
        by_row = [name for name, column in COLUMNS.items() if column.alignment == "row"]
        padded |= {name: torch.from_numpy(getattr(rows, name)) for name in by_row}
        fields = {
            name: padding.pad_rows(each.values, each.alignment, each.spec.dtype, each.spec.fill, each.spec.shape)
            for name, each in rows.open_columns.items()
        }
        others: dict[str, object] = {"rows": rows.rows, "pad_token_id": pad_token_id}
        others |= {"field_fills": field_fills(rows), "field_alignment": field_alignment(rows)}
        return _make_batch(padded, padding, fields=fields, **others)

    def _alignment(self, name: str, tensor: Tensor) -> Alignment:
        size, width = len(self), self.input_ids.shape[1]
        found = find_alignment(name, tuple(tensor.shape), size, self.response_length, width)
        # Without prompts, responses and whole rows have one shape, so the saved alignment decides. Else the shape does.
        return found if self.prompt_length or found == "row" else self.field_alignment.get(name, found)


_TAKEN_NAMES: Final = frozenset({*dir(RolloutBatch), *dir(PackedBatch), *ROW_NAMES})


def collate(results: Sequence[EpisodeResult], *, pad_token_id: int, **widths: Unpack[Widths]) -> RolloutBatch:
    """
    Make a batch of episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: a row does not fit, or an episode's scores do not fit its trajectories.
    """
    return RolloutBatch.from_rows(build_rows(results), pad_token_id=pad_token_id, **widths)


def _make_batch(padded: dict[str, Tensor], padding: Padding, **others: Any) -> RolloutBatch:
    """Make a batch of padded columns, whose indices count within rows until here; without blocks they are missing."""
    if "path_start" not in padded:
        padded |= no_layout(len(padding.prompt_lens), padding.prompt_length + padding.response_length)
    shift = padding.prompt_length - torch.tensor(padding.prompt_lens, dtype=torch.int64)
    padded |= _shift_indices(padded, shift)
    columns: dict[str, Any] = {**padded, "attention_mask": padding.mask()}
    return RolloutBatch(**columns, prompt_length=padding.prompt_length, **others)


def _any(tensor: Tensor) -> bool:
    values = as_array(tensor)
    return bool((tensor if values is None else values).any())


def _fill(name: str, pad_token_id: int) -> int:
    return pad_token_id if name == "input_ids" else COLUMNS[name].fill


def _torch_type(dtype: DTypeLike) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _shift_indices(padded: Mapping[str, Tensor], by: Tensor) -> dict[str, Tensor]:
    """Return the index columns moved by (B,) columns; the 0 of tokens outside blocks stays."""
    # The first path of a block at index 0 looks as if it were outside, and sees the same either way.
    if not _any(padded["path_start"]):
        return {}
    inside = padded["path_start"] > 0
    return {name: torch.where(inside, padded[name] + by.int()[:, None], padded[name]) for name in _INDEX_COLUMNS}
