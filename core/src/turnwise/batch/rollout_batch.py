"""
Trajectories as padded tensors, and their ways to packed ones, to a TensorDict and to files.

Every real token is the same in all forms; only pads come and go. A batch depends on the episodes and their order
alone, never on how they were split among workers: ``concat([collate(a), collate(b)])`` equals ``collate(a + b)``.

Shapes: B rows, one per trajectory; P prompt columns; R response columns; T = P + R; N real tokens of all rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, field, frozen
from attrs import fields as attributes_of
from torch import Tensor

from turnwise.errors import DataError, DuplicateNameError, PluginError, TrajectoryError
from turnwise.packing import (
    FILLS,
    RESPONSE_DTYPES,
    TOKEN_DTYPES,
    BatchRow,
    PackedBatch,
    concat_packed,
    group_index,
    padded_columns,
    rows_of,
    rows_of_episodes,
)
from turnwise.padding import Alignment, Padding, alignment_of, as_array
from turnwise.result import EpisodeResult

_ALIGNMENT: Final[Mapping[str, Alignment]] = {
    **dict.fromkeys(TOKEN_DTYPES, "token"),
    **dict.fromkeys(RESPONSE_DTYPES, "response"),
    "num_turns": "row",
    "scored": "row",
}
_TENSORS: Final = (*_ALIGNMENT, "attention_mask")
_LAYOUT: Final = ("block_start", "path_start")
_METADATA_KEY: Final = "turnwise.rollout_batch"


@frozen(kw_only=True, eq=False)
class RolloutBatch:
    """
    Padded rows: prompts end, and responses begin, at column P.

    What pads hold: `pad_token_id` in `input_ids`, -1 in `weight_versions`, 0 everywhere else. The layout indices
    count columns, so that ``visible(q, k) = k <= q and (k < block_start[q] or k >= path_start[q])`` holds for columns
    q, k of a row where `attention_mask` is 1 at both; `visibility` says the same for all of them.

    Attributes:
        input_ids: (B, T) int64.
        attention_mask: (B, T) int64, 1 on real tokens.
        position_ids: (B, T) int64, as the record has them: the paths of a block share theirs.
        block_start: (B, T) int32, column at which the token's block starts; 0 outside blocks.
        path_start: (B, T) int32, column at which the token's own path starts; 0 outside blocks.
        response_mask: (B, R) int64, 1 exactly on tokens that the policy sampled.
        loss_mask: (B, R) int64, the response mask, all 0 in rows that say nothing about the policy.
        rollout_log_probs: (B, R) float32, of each sampled id when it was sampled.
        rm_scores: (B, R) float32, where the reward set them.
        weight_versions: (B, R) int32, of the weights that sampled each id; -1 elsewhere.
        num_turns: (B,) int64, unbroken runs of sampled tokens.
        scored: (B,) bool; where it is False no reward was given, which is not a reward of 0.
        rows: B of them: what each row is.
        prompt_length: P.
        pad_token_id: the id that pads hold.
        fields: what postprocessors added; see `with_fields`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    block_start: Tensor
    path_start: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    rollout_log_probs: Tensor
    rm_scores: Tensor
    weight_versions: Tensor
    num_turns: Tensor
    scored: Tensor
    rows: tuple[BatchRow, ...]
    prompt_length: int
    pad_token_id: int
    fields: Mapping[str, Tensor] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Refuse tensors whose shapes disagree."""
        widths = {"token": [self.input_ids.shape[-1]], "response": [self.response_length], "row": []}
        for name in _TENSORS:
            wanted, shape = [len(self), *widths[_ALIGNMENT.get(name, "token")]], list(getattr(self, name).shape)
            if shape != wanted:
                raise TrajectoryError(f"{name} has shape {shape}, expected {wanted}")

    def __len__(self) -> int:
        """Return B."""
        return len(self.rows)

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

    @property
    def group_index(self) -> Tensor:
        """(B,) int64: the GRPO group of each row, from 0 in order of appearance."""
        return torch.tensor(group_index(self.rows), dtype=torch.int64)

    def column(self, name: str) -> list[Any]:
        """Return the B values of one attribute of `rows`, such as `uid`."""
        return [getattr(row, name) for row in self.rows]

    def visibility(self) -> Tensor:
        """
        Return (B, T, T) bool: whether the token at a column (second axis) sees the one at another (third axis).

        Pads see nothing and are not seen. It takes B * T * T bytes: `select` a few rows first.
        """
        key = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        outside = (key < self.block_start[:, :, None]) | (key >= self.path_start[:, :, None])
        real = self.attention_mask.bool()
        return outside & (key <= key[:, None]) & real[:, :, None] & real[:, None, :]

    # Other batches of the same rows

    def with_fields(self, new: Mapping[str, Tensor]) -> RolloutBatch:
        """
        Return a batch with more fields.

        Args:
            new: name to a tensor of shape (B,), (B, R, ...) or (B, T, ...), which says what its values belong to:
                rows, response tokens or tokens. When padding changes, its pads hold 0.

        Raises:
            DuplicateNameError: a name is taken: by the batch, a `BatchRow` or another field.
            PluginError: a shape is none of these.
        """
        for name, tensor in new.items():
            if name in _TAKEN_NAMES or name in self.fields:
                raise DuplicateNameError(f"field {name!r}: the batch has something of that name already")
            self._alignment(name, tensor)
        return evolve(self, fields={**self.fields, **new})

    def select(self, rows: slice | Sequence[int] | Tensor) -> RolloutBatch:
        """Return some rows in the given order, padded as they are; a (B,) bool tensor picks those that are True."""
        chosen = rows if isinstance(rows, slice | Tensor) else torch.tensor(list(rows), dtype=torch.int64)
        index = torch.arange(len(self))[chosen]
        return evolve(
            self,
            **{name: getattr(self, name)[index] for name in _TENSORS},
            rows=tuple(self.rows[i] for i in index.tolist()),
            fields={name: tensor[index] for name, tensor in self.fields.items()},
        )

    def packed(self) -> PackedBatch:
        """Return the real tokens end to end; `from_packed` undoes it."""
        prompt_lens, lens = self.prompt_lens, self.attention_mask.sum(1)
        padding = Padding(
            prompt_lens=prompt_lens.tolist(),
            response_lens=self.response_lens.tolist(),
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )
        padded = {name: getattr(self, name) for name in _ALIGNMENT}
        padded |= _shifted(padded, prompt_lens - self.prompt_length)
        alignment = {name: self._alignment(name, tensor) for name, tensor in self.fields.items()}
        return PackedBatch(
            **{name: padding.unpad(t, _ALIGNMENT[name], FILLS.get(name, 0)) for name, t in padded.items()},
            cu_seqlens=torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(),
            prompt_lens=prompt_lens,
            rows=self.rows,
            pad_token_id=self.pad_token_id,
            fields={name: padding.unpad(tensor, alignment[name]) for name, tensor in self.fields.items()},
            field_alignment=alignment,
        )

    @classmethod
    def from_packed(
        cls,
        packed: PackedBatch,
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        pad_to_multiple_of: int = 1,
    ) -> RolloutBatch:
        """
        Pad rows that stand end to end.

        Args:
            packed: the rows.
            prompt_length: P; None takes the longest prompt.
            response_length: R; None takes the longest response.
            pad_to_multiple_of: what P and R are rounded up to where they are not given.

        Raises:
            TrajectoryError: a row does not fit.
        """
        lens = packed.prompt_lens.tolist(), packed.response_lens.tolist()
        padding = Padding.fitting(*lens, prompt_length, response_length, pad_to_multiple_of)
        fills = {**FILLS, "input_ids": packed.pad_token_id}
        padded = {
            name: padding.pad(getattr(packed, name), alignment, fills.get(name, 0))
            for name, alignment in _ALIGNMENT.items()
        }
        fields = {name: padding.pad(t, packed.field_alignment[name]) for name, t in packed.fields.items()}
        return cls._of(padding, padded, rows=packed.rows, pad_token_id=packed.pad_token_id, fields=fields)

    @classmethod
    def _of(cls, padding: Padding, padded: Mapping[str, Tensor], **others: Any) -> RolloutBatch:
        shift = padding.prompt_length - torch.tensor(padding.prompt_lens, dtype=torch.int64)
        columns: dict[str, Any] = {**padded, **_shifted(padded, shift)}
        return cls(
            **columns,
            attention_mask=padding.mask(),
            prompt_length=padding.prompt_length,
            **others,
        )

    def _alignment(self, name: str, tensor: Tensor) -> Alignment:
        return alignment_of(name, tuple(tensor.shape), len(self), self.response_length, self.input_ids.shape[1])

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _TENSORS} | dict(self.fields)

    # Other forms

    def to_tensordict(self) -> Any:
        """
        Return a TensorDict of batch size (B,): all tensors, `prompts` and `responses`, the fields, all by their names.

        The attributes of `rows` and `pad_token_id` are non-tensor data. Needs `turnwise[torch]`.
        """
        from tensordict import NonTensorStack, TensorDict

        tensors = {**self._tensors(), "prompts": self.prompts, "responses": self.responses}
        result = TensorDict(tensors, batch_size=[len(self)])
        for name in _ROW_NAMES:
            values = [str(value) if name == "status" else value for value in self.column(name)]
            result[name] = NonTensorStack(*values) if values else NonTensorStack(batch_size=[0])
        result.set_non_tensor("pad_token_id", self.pad_token_id)
        return result

    @classmethod
    def from_tensordict(cls, tensordict: Any) -> RolloutBatch:
        """
        Restore what `to_tensordict` returned, or rows or a concatenation of such.

        Raises:
            PluginError: an entry is missing, or one that was added has a shape that no field may have.
        """
        own = {*_TENSORS, *_ROW_NAMES, "prompts", "responses", "pad_token_id"}
        missing = sorted(own - set(tensordict.keys()))
        if missing:
            raise PluginError(f"a TensorDict of a batch lacks {', '.join(missing)}")
        columns = {name: tensordict.get(name).tolist() for name in _ROW_NAMES}
        batch = cls(
            **{name: tensordict[name] for name in _TENSORS},
            rows=rows_of(columns, tensordict.batch_size[0]),
            prompt_length=tensordict["prompts"].shape[1],
            pad_token_id=tensordict["pad_token_id"],
        )
        return batch.with_fields({name: tensordict[name] for name in sorted(set(tensordict.keys()) - own)})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all; what is no tensor stands in its metadata as JSON."""
        from safetensors.torch import save_file

        metadata = {
            "prompt_length": self.prompt_length,
            "pad_token_id": self.pad_token_id,
            "num_rows": len(self),
            "rows": {name: self.column(name) for name in _ROW_NAMES},
        }
        # No tensor may share memory with another in such a file.
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._tensors().items()}
        partial = Path(f"{path}.partial")
        save_file(copies, partial, {_METADATA_KEY: json.dumps(metadata)})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> RolloutBatch:
        """
        Read what `save` wrote.

        Raises:
            DataError: the file is missing, or is not such a file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            batch = cls(
                **{name: tensors.pop(name) for name in _TENSORS},
                rows=rows_of(metadata["rows"], metadata["num_rows"]),
                prompt_length=metadata["prompt_length"],
                pad_token_id=metadata["pad_token_id"],
            )
            return batch.with_fields(tensors)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, PluginError) as error:
            raise DataError(f"{path}: not a saved batch: {type(error).__name__}: {error}") from error


_ROW_NAMES: Final = tuple(attribute.name for attribute in attributes_of(BatchRow))
_TAKEN_NAMES: Final = frozenset({*dir(RolloutBatch), *_ROW_NAMES})


def collate(
    results: Sequence[EpisodeResult],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_to_multiple_of: int = 1,
) -> RolloutBatch:
    """
    Make a batch of episodes, one row per trajectory, in their order.

    An episode without a trajectory gives a row of pads, so that every episode of a group has its row.

    Args:
        results: finished episodes; none gives a batch of no rows.
        pad_token_id: what pads hold.
        prompt_length: P; None takes the longest prompt.
        response_length: R; None takes the longest response.
        pad_to_multiple_of: what P and R are rounded up to where they are not given.

    Raises:
        TrajectoryError: a row does not fit, or an episode's scores do not fit its trajectories.
    """
    rows = rows_of_episodes(results)
    lens = rows.prompt_lens, rows.response_lens
    padding = Padding.fitting(*lens, prompt_length, response_length, pad_to_multiple_of)
    padded = padded_columns(rows, padding, pad_token_id)
    return RolloutBatch._of(padding, padded, rows=rows.rows, pad_token_id=pad_token_id)  # noqa: SLF001 - its own factory


def concat(
    batches: Sequence[RolloutBatch],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_to_multiple_of: int = 1,
) -> RolloutBatch:
    """
    Put the rows of batches after one another, padded anew as `collate` would.

    Raises:
        TrajectoryError: there is no batch, they differ in pad id or fields, or a row does not fit.
    """
    return RolloutBatch.from_packed(
        concat_packed([batch.packed() for batch in batches]),
        prompt_length=prompt_length,
        response_length=response_length,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def _shifted(padded: Mapping[str, Tensor], by: Tensor) -> dict[str, Tensor]:
    """Return the layout with its indices moved by (B,) columns; 0 outside blocks stays."""
    # The first path of a block at index 0 looks as if it were outside, and sees the same either way.
    values = as_array(padded["path_start"])
    if values is not None and not values.any():
        return {}
    inside = padded["path_start"] > 0
    return {name: torch.where(inside, padded[name] + by.int()[:, None], padded[name]) for name in _LAYOUT}
