"""
The trainer's view of a batch: rows end to end, and one tensor per column with an entry for each token.

Shapes: B rows; N tokens in all rows.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.record.columns import NO_VERSION
from turnwise_grpo_trainer.objective.row_pictures import PictureRows

_INDEX_COLUMNS = ("input_ids", "position_ids")
_LAYOUT = ("block_start", "path_start")
FORWARD_COLUMNS = (*_INDEX_COLUMNS, *_LAYOUT)
"""The columns that a model's forward pass reads."""


@frozen(eq=False)
class TokenRows:
    """
    Rows end to end; row b is ``bounds[b]:bounds[b + 1]``.

    Attributes:
        columns: (N,) tensors by name: the columns of a batch that training needs, and added ones. Ids, positions and
            the loss mask are int64.
        bounds: B + 1 offsets.
        forward_columns: names of the columns that the model's forward pass reads. Rows share a prefix only where all of
            them are equal. A replay adds its column, such as the experts of the rollout: (N, ...) integers.
        pictures: of a vision-language model; None for another.
    """

    columns: Mapping[str, Tensor]
    bounds: tuple[int, ...]
    forward_columns: tuple[str, ...] = FORWARD_COLUMNS
    pictures: PictureRows | None = None

    @classmethod
    def from_batch(cls, batch: RolloutBatch, loss_mask: Tensor) -> TokenRows:
        """
        Take the tokens of a padded batch, without its pads.

        Args:
            batch: B rows with R response columns.
            loss_mask: (B, R), 1 on the tokens in the loss.
        """
        packed = batch.packed()
        rows = cls(
            {
                **{name: getattr(packed, name).long() for name in _INDEX_COLUMNS},
                **{name: getattr(packed, name) for name in _LAYOUT},
                "rollout_log_probs": unpad(batch, batch.rollout_log_probs),
                "weight_versions": unpad(batch, batch.weight_versions, fill=NO_VERSION),
            },
            tuple(packed.cu_seqlens.tolist()),
        )
        mask = unpad(batch, loss_mask.long())
        # No token precedes the first one of a row, so nothing predicts it.
        mask[[start for start, stop in zip(rows.bounds, rows.bounds[1:], strict=False) if stop > start]] = 0
        return rows.with_columns(loss_mask=mask)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def sizes(self) -> list[int]:
        """What each row computes besides pads: its tokens, and the patches of its pictures."""
        if self.pictures is None:
            return self.lengths
        return [length + patches for length, patches in zip(self.lengths, self.pictures.num_patches, strict=True)]

    @property
    def targets(self) -> Tensor:
        """(M,) int64: the positions of the tokens in the loss, ascending."""
        return self.columns["loss_mask"].nonzero().squeeze(1)

    @property
    def row_index(self) -> Tensor:
        """(N,) int64: the row of each token."""
        return torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.lengths, dtype=torch.int64))

    @property
    def predictors(self) -> Tensor:
        """
        (N,) int64: the token whose output predicts each token.

        That is the token before it, except for the first token of a path: the token before the block predicts the first
        token of every path. The first token of a row has no predictor and gets its own position.
        """
        index = torch.arange(self.num_tokens)
        starts = torch.tensor(self.bounds[:-1], dtype=torch.int64)[self.row_index]
        path_start = self.columns["path_start"]
        opens = (path_start > 0) & (index - starts == path_start)
        before = torch.where(opens, self.columns["block_start"].long() + starts, index) - 1
        return torch.maximum(before, starts)

    def with_columns(self, **new: Tensor) -> TokenRows:
        """Return the rows with columns added or replaced, each (N,)."""
        return evolve(self, columns={**self.columns, **new})

    def select(self, rows: Sequence[int]) -> TokenRows:
        """Return some rows, in the given order."""
        spans = [(self.bounds[row], self.bounds[row + 1]) for row in rows]
        index = torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in spans)])
        bounds = [0]
        for start, stop in spans:
            bounds.append(bounds[-1] + stop - start)
        columns = {name: column[index] for name, column in self.columns.items()}
        pictures = None if self.pictures is None else self.pictures.select(rows)
        return evolve(self, columns=columns, bounds=tuple(bounds), pictures=pictures)


def unpad(batch: RolloutBatch, values: Tensor, fill: float = 0) -> Tensor:
    """Return (N, ...) the values of (B, R, ...) response columns on the tokens of a batch, `fill` on prompts."""
    whole = values.new_full((*batch.input_ids.shape, *values.shape[2:]), fill)
    whole[:, batch.prompt_length :] = values
    return whole[batch.attention_mask.bool()]


def pad(batch: RolloutBatch, values: Tensor, fill: float = 0) -> Tensor:
    """Return (B, R, ...) the values of (N, ...) tokens on response columns, `fill` on pads; the inverse of `unpad`."""
    whole = values.new_full((*batch.input_ids.shape, *values.shape[1:]), fill)
    whole[batch.attention_mask.bool()] = values
    return whole[:, batch.prompt_length :]
