"""
Rows cut into micro-batches that fit a token budget, and laid out for a model.

Packed or padded, every token sees the same tokens from the same positions. Where a row has blocks of paths a dense mask
says what is visible; otherwise the model's own causal mask does.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from turnwise_grpo_trainer.rows import TokenRows


@frozen(eq=False)
class MicroBatch:
    """
    What one forward pass takes. b rows of L columns; packed, b is 1. M tokens enter the loss, C columns predict them.

    Attributes:
        input_ids: (b, L) int64.
        position_ids: (b, L) int64; those of pads go on from the row's, because transformers takes a jump for the start
            of another sequence.
        block_start: (b, L) int64, column at which a token's block starts; 0 outside blocks.
        path_start: (b, L) int64, column at which its path starts; 0 outside blocks.
        row_ids: (b, L) int64, the row of the batch that a column belongs to; -1 on pads.
        keep: (C,) int64, the columns whose output is needed.
        predictors: (2, M) int64: the row of each token and its predictor's place in `keep`.
        labels: (M,) int64, their ids.
        tokens: (M,) int64, where they stand in the `TokenRows`.
        packed: whether rows stand end to end.
        has_blocks: whether any token lies in a path.
    """

    input_ids: Tensor
    position_ids: Tensor
    block_start: Tensor
    path_start: Tensor
    row_ids: Tensor
    keep: Tensor
    predictors: Tensor
    labels: Tensor
    tokens: Tensor
    packed: bool
    has_blocks: bool

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in asdict(self, recurse=False).items() if isinstance(value, Tensor)
        }
        return evolve(self, **moved)

    @property
    def real(self) -> Tensor:
        """(b, L) int64: 1 on tokens, 0 on pads."""
        return (self.row_ids >= 0).long()

    def attention_mask(self) -> Tensor | None:
        """
        Return what says which tokens see which.

        None when the model's causal mask, begun anew where positions do, says it all: pads stand behind everything
        real, which sees none of them. (b, 1, L, L) bool, where True is visible, for rows with blocks; there pads see
        pads alone.
        """
        if not self.has_blocks:
            return None
        key = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        outside = (key < self.block_start[:, :, None]) | (key >= self.path_start[:, :, None])
        same_row = self.row_ids[:, :, None] == self.row_ids[:, None, :]
        return (outside & (key <= key[:, None]) & same_row)[:, None]


def micro_batches(rows: TokenRows, *, max_tokens: int, packed: bool) -> Iterator[MicroBatch]:
    """
    Yield micro-batches of the rows that have a token in the loss, all of which are this process's.

    Args:
        rows: of a mini-batch.
        max_tokens: most tokens of one, pads included; a longer row goes alone.
        packed: rows end to end in one sequence, or padded to the longest.
    """
    for group in budgeted(rows, shares(rows, 1)[0], max_tokens=max_tokens, packed=packed):
        yield laid_out(rows, group, packed=packed)


def shares(rows: TokenRows, num_shares: int) -> list[list[int]]:
    """Return the rows that have a token in the loss, dealt out in order of length, longest first."""
    lengths = rows.lengths
    trained = torch.bincount(rows.row_index[rows.targets], minlength=len(rows)).tolist()
    order = sorted((row for row in range(len(rows)) if trained[row]), key=lambda row: (-lengths[row], row))
    return [order[number::num_shares] for number in range(num_shares)]


def budgeted(rows: TokenRows, order: Sequence[int], *, max_tokens: int, packed: bool) -> list[list[int]]:
    """Return rows that are ordered by length, longest first, in groups that fit the budget."""
    lengths = rows.lengths
    groups: list[list[int]] = []
    size = 0
    for row in order:
        grown = size + lengths[row] if packed or not groups else lengths[groups[-1][0]] * (len(groups[-1]) + 1)
        if groups and grown <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            grown = lengths[row]
        size = grown
    return groups


def laid_out(rows: TokenRows, group: Sequence[int], *, packed: bool) -> MicroBatch:
    """Return some rows as one micro-batch."""
    chosen = rows.select(group)
    lengths = torch.tensor(chosen.lengths, dtype=torch.int64)
    owner, starts = chosen.row_index, torch.tensor(chosen.bounds[:-1], dtype=torch.int64)
    at = torch.arange(chosen.num_tokens)
    row, column = (torch.zeros_like(owner), at) if packed else (owner, at - starts[owner])
    shape = (1, chosen.num_tokens) if packed else (len(chosen), int(lengths.max()))

    def placed(values: Tensor, fill: int = 0) -> Tensor:
        laid = torch.full(shape, fill, dtype=torch.int64)
        laid[row, column] = values.long()
        return laid

    positions = placed(chosen["position_ids"])
    if not packed:
        behind = torch.arange(shape[1]) - lengths[:, None] + 1
        last = positions.gather(1, lengths[:, None] - 1)
        positions = torch.where(behind > 0, last + behind, positions)
    inside = chosen["path_start"] > 0
    moved = inside * starts[owner] if packed else torch.zeros_like(owner)
    targets = chosen.targets
    predictors = chosen.predictors[targets]
    keep, places = torch.unique(column[predictors], return_inverse=True)
    return MicroBatch(
        input_ids=placed(chosen["input_ids"]),
        position_ids=positions,
        block_start=placed(chosen["block_start"] + moved),
        path_start=placed(chosen["path_start"] + moved),
        row_ids=placed(owner, fill=-1),
        keep=keep,
        predictors=torch.stack([row[predictors], places]),
        labels=chosen["input_ids"][targets],
        tokens=torch.cat([torch.arange(rows.bounds[each], rows.bounds[each + 1]) for each in group])[targets],
        packed=packed,
        has_blocks=bool(inside.any()),
    )
