"""
From two ints per token to ranges of queries and keys.

``visible(q, k) = k <= q and (k < block_start[q] or k >= path_start[q])``, both 0 outside paths. So tokens come in runs:
a path sees all before its block and itself causally, and a run outside blocks sees all before it and itself causally.

Shapes: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Part:
    """
    Queries that attend to a range of keys: to all of them, or to themselves causally.

    Attributes:
        row: of the batch.
        queries: columns, from and to.
        keys: columns, from and to; those of the queries when causal.
        causal: whether each query sees only the keys up to itself.
    """

    row: int
    queries: slice
    keys: slice
    causal: bool


@frozen
class LayoutPlan:
    """
    How the rows of a batch attend.

    Attributes:
        runs: the causal parts; together they have every real token once.
        prefixes: the full parts; the paths of a block share one.
        num_rows: B.
        num_columns: T.
    """

    runs: tuple[Part, ...]
    prefixes: tuple[Part, ...]
    num_rows: int
    num_columns: int


def plan(block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None) -> LayoutPlan:
    """
    Plan the attention of a batch.

    Args:
        block_start: (B, T) or (T,), column at which the token's block starts; 0 outside.
        path_start: (B, T) or (T,), column at which the token's own path starts; 0 outside.
        attention_mask: (B, T) or (T,), 1 on real tokens, which stand together; None when all are real.

    Raises:
        ValueError: the shapes differ, pads stand between real tokens, or the ints are not those of a layout.
    """
    blocks, paths = _rows(block_start), _rows(path_start)
    real = torch.ones_like(blocks) if attention_mask is None else _rows(attention_mask)
    if not blocks.shape == paths.shape == real.shape:
        raise ValueError(f"shapes differ: {tuple(blocks.shape)}, {tuple(paths.shape)}, {tuple(real.shape)}")
    runs: list[Part] = []
    prefixes: list[Part] = []
    rows = zip(blocks.tolist(), paths.tolist(), real.tolist(), strict=True)
    for row, (block_row, path_row, real_row) in enumerate(rows):
        span = _span(real_row, row)
        found = list(_runs(block_row, path_row, span, row))
        runs += [Part(row, own, own, causal=True) for own, _ in found]
        prefixes += _prefixes(found, span.start, row)
    return LayoutPlan(tuple(runs), tuple(prefixes), *blocks.shape)


def predecessors(block_start: Tensor, path_start: Tensor) -> Tensor:
    """
    Return the columns whose logits predict the tokens: (B, T) or (T,) int64, -1 for column 0.

    Args:
        block_start: (B, T) or (T,).
        path_start: (B, T) or (T,).
    """
    columns = torch.arange(block_start.shape[-1], device=block_start.device)
    begins = (path_start == columns) & (columns > 0)
    return torch.where(begins, block_start.long() - 1, columns - 1)


def _rows(columns: Tensor) -> Tensor:
    return columns[None] if columns.ndim == 1 else columns


def _span(real: list[int], row: int) -> slice:
    """Return where the real tokens of a row stand."""
    count = sum(map(bool, real))
    start = next((index for index, value in enumerate(real) if value), 0)
    if not all(real[start : start + count]):
        raise ValueError(f"row {row} has pads between real tokens")
    return slice(start, start + count)


def _runs(blocks: list[int], paths: list[int], span: slice, row: int) -> Iterator[tuple[slice, int]]:
    """Yield the columns of each run, and where its block starts; -1 outside blocks."""
    start = span.start
    for (block, path), group in groupby(zip(blocks[span], paths[span], strict=True)):
        stop = start + sum(1 for _ in group)
        outside = block == path == 0
        if not outside and (path != start or block > path):
            raise ValueError(f"row {row}: columns {start}:{stop} say that their path starts at {path}, block {block}")
        yield slice(start, stop), -1 if outside else block
        start = stop


def _prefixes(runs: list[tuple[slice, int]], first: int, row: int) -> Iterator[Part]:
    """Yield what runs see before them; neighbours of one block see the same and go together."""
    for block, group in groupby(runs, key=lambda run: run[1]):
        own = [columns for columns, _ in group]
        if block >= 0:
            own, stop = [slice(own[0].start, own[-1].stop)], block
        for columns in own:
            stop = columns.start if block < 0 else stop
            if stop > first:
                yield Part(row, columns, slice(first, stop), causal=False)
