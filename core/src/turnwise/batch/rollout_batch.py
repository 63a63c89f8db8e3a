"""
Padded batches: the columns of many rows as rectangles.

Every real token is the same in all forms; only pads come and go. A batch depends on the episodes and their order
alone, never on the workers that ran them.

Shapes: B rows, one per trajectory; P prompt columns; R response columns; T = P + R; N real tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Unpack

import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns
from turnwise.batch.packed_batch import PackedBatch, collate_packed
from turnwise.batch.padding import Padding, Widths, as_array, find_alignment, pack_column
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

    Attributes:
        attention_mask: (B, T) int64, 1 on real tokens.
        prompt_length: P.
    """

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
        """(B, P) int64, left-padded: a view of `input_ids`."""
        return self.input_ids[:, : self.prompt_length]

    @property
    def responses(self) -> Tensor:
        """(B, R) int64, right-padded: a view of `input_ids`."""
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
        for name, tensor in new.items():
            if name in _TAKEN_NAMES or name in self.fields:
                raise DuplicateNameError(f"field {name!r}: the batch already has an attribute or a field of that name")
            self._alignment(name, tensor)
        return evolve(self, fields={**self.fields, **new})

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
        alignment = {name: self._alignment(name, tensor) for name, tensor in self.fields.items()}
        return PackedBatch(
            **{
                name: pack_column(padding.unpad(padded[name], column.alignment, column.fill), column)
                for name, column in COLUMNS.items()
            },
            cu_seqlens=torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(),
            prompt_lens=prompt_lens,
            rows=self.rows,
            pad_token_id=self.pad_token_id,
            fields={name: padding.unpad(tensor, alignment[name]) for name, tensor in self.fields.items()},
            field_alignment=alignment,
        )

    @classmethod
    def from_packed(cls, packed: PackedBatch, **widths: Unpack[Widths]) -> RolloutBatch:
        """Pad a packed batch; `TrajectoryError` when a row does not fit."""
        padding = Padding.fitting(packed.prompt_lens.tolist(), packed.response_lens.tolist(), **widths)
        fills = {"input_ids": packed.pad_token_id}
        padded = {
            name: padding.pad(getattr(packed, name), column.alignment, fills.get(name, column.fill), column.dtype)
            for name, column in COLUMNS.items()
        }
        fields = {name: padding.pad(t, packed.field_alignment[name]) for name, t in packed.fields.items()}
        # Indices count within rows until here.
        shift = padding.prompt_length - torch.tensor(padding.prompt_lens, dtype=torch.int64)
        return cls(
            **{**padded, **_shift_indices(padded, shift)},
            attention_mask=padding.mask(),
            prompt_length=padding.prompt_length,
            rows=packed.rows,
            pad_token_id=packed.pad_token_id,
            fields=fields,
        )

    def _alignment(self, name: str, tensor: Tensor) -> Alignment:
        return find_alignment(name, tuple(tensor.shape), len(self), self.response_length, self.input_ids.shape[1])


_TAKEN_NAMES: Final = frozenset({*dir(RolloutBatch), *dir(PackedBatch), *ROW_NAMES})


def collate(results: Sequence[EpisodeResult], *, pad_token_id: int, **widths: Unpack[Widths]) -> RolloutBatch:
    """
    Make a batch of episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: a row does not fit, or an episode's scores do not fit its trajectories.
    """
    return RolloutBatch.from_packed(collate_packed(results, pad_token_id=pad_token_id), **widths)


def _shift_indices(padded: Mapping[str, Tensor], by: Tensor) -> dict[str, Tensor]:
    """Return the index columns moved by (B,) columns; the 0 of tokens outside blocks stays."""
    # The first path of a block at index 0 looks as if it were outside, and sees the same either way.
    values = as_array(padded["path_start"])
    if values is not None and not values.any():
        return {}
    inside = padded["path_start"] > 0
    return {name: torch.where(inside, padded[name] + by.int()[:, None], padded[name]) for name in _INDEX_COLUMNS}
