"""
Forests: rows that begin with the same tokens, in one line in which each shared token is forwarded once.

Rows are sorted, so rows with a common prefix follow each other. Each row then adds the tokens that it does not share
with the row before it, which is the depth-first order of the tree of all rows. Two tokens are one if the model computes
the same from them: equal ids at equal positions with equal places in blocks, after equal tokens. All that belongs to
the loss stays in the rows; several rows read the output of one column.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from turnwise_grpo_trainer.learner.micro_batches import MicroBatch, index_targets, scatter_replayed
from turnwise_grpo_trainer.objective.rows import TokenRows

Keys = NDArray[np.int32]


@frozen(eq=False)
class SortedRows:
    """
    Rows in the order of their tokens.

    Attributes:
        order: n indices of rows.
        shared: n numbers of tokens that a row shares with the row before it; 0 of the first one.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def num_shared(self) -> int:
        """Tokens that a forest of all rows does not repeat."""
        return sum(self.shared)


def sort_rows(rows: TokenRows, chosen: Sequence[int]) -> SortedRows:
    """Sort some rows by their tokens; of equal rows, the one with the lower index comes first."""
    keys = {row: keys_of(rows, row) for row in chosen}
    # The bytes of big-endian numbers have the order of the numbers.
    order = sorted(chosen, key=lambda row: (keys[row].astype(">u4").tobytes(), row))
    shared = [0] * len(order)
    for number in range(1, len(order)):
        shared[number] = _count_shared(keys[order[number - 1]], keys[order[number]])
    return SortedRows(tuple(order), tuple(shared))


def keys_of(rows: TokenRows, row: int) -> Keys:
    """Return (L, K) int32: all that the model's forward pass reads of each token of a row."""
    span = slice(rows.bounds[row], rows.bounds[row + 1])
    columns = [rows[name][span].reshape(span.stop - span.start, -1) for name in rows.forward_columns]
    keys: Keys = torch.cat([column.int() for column in columns], 1).numpy()
    return keys


def _count_shared(one: Keys, other: Keys) -> int:
    size = min(len(one), len(other))
    differ = (one[:size] != other[:size]).any(1)
    return int(differ.argmax()) if differ.any() else size


def place_tokens(lengths: Sequence[int], shared: Sequence[int]) -> tuple[Tensor, Tensor]:
    """
    Return the place of each token of sorted rows in their forest.

    Args:
        lengths: tokens of each row.
        shared: as in `SortedRows`.

    Returns:
        (N,) int64, the column of each token of the rows; and (L,) int64, the end of the subtree of each column.
    """
    stop = 0
    places: list[NDArray[np.int64]] = []
    path = np.zeros(0, np.int64)
    num_columns = sum(lengths) - sum(shared)
    ends = np.zeros(num_columns, np.int64)
    for length, common in zip(lengths, shared, strict=True):
        start, stop = stop, stop + length - common
        path = np.concatenate([path[:common], np.arange(start, stop)])
        ends[path] = stop
        places.append(path)
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places])), torch.from_numpy(ends)


def collate_forest(rows: TokenRows, group: Sequence[int]) -> MicroBatch:
    """Return some rows as one micro-batch of one line, in which each shared prefix is once; in any order."""
    found = sort_rows(rows, group)
    chosen = rows.select(found.order)
    column, ends = place_tokens(chosen.lengths, found.shared)
    starts = torch.tensor(chosen.bounds[:-1], dtype=torch.int64)[chosen.row_index]

    def scatter(values: Tensor) -> Tensor:
        filled = torch.zeros(1, len(ends), dtype=torch.int64)
        filled[0, column] = values.long()  # tokens of one column have equal values
        return filled

    inside = chosen["path_start"] > 0

    def scatter_index(name: str) -> Tensor:
        return scatter(torch.where(inside, column[starts + chosen[name]], 0))

    return MicroBatch(
        input_ids=scatter(chosen["input_ids"]),
        position_ids=scatter(chosen["position_ids"]),
        block_start=scatter_index("block_start"),
        path_start=scatter_index("path_start"),
        row_ids=torch.zeros(1, len(ends), dtype=torch.int64),
        **index_targets(rows, found.order, torch.zeros_like(column), column),
        packed=True,
        has_blocks=bool(inside.any()),
        subtree_end=ends[None],
        replayed=scatter_replayed(chosen, torch.zeros_like(column), column, (1, len(ends))),
    )
