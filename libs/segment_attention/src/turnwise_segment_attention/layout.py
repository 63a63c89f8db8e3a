"""
Turns two ints per token into ranges of queries and keys.

``visible(q, k) = k <= q and (k < block_start[q] or k >= path_start[q])``, with both ints 0 outside paths. So a row
consists of runs. A path sees all columns before its block, and itself causally. A run outside blocks sees all columns
before it, and itself causally. Rows that share prefixes have a third int, see `turnwise_segment_attention.forest`.

Shapes: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from attrs import frozen
from torch import Tensor

from turnwise_segment_attention import forest


@frozen
class Part:
    """
    A range of queries with the range of keys that they attend to.

    Attributes:
        row: row of the batch.
        queries: columns of the queries.
        keys: columns of the keys; equal to `queries` if causal.
        causal: whether each query sees only the keys up to its column.
    """

    row: int
    queries: slice
    keys: slice
    causal: bool


@frozen
class LayoutPlan:
    """
    The parts of a batch's attention.

    Attributes:
        runs: the causal parts; together they contain every real token once.
        prefixes: the full parts; the paths of a block share one.
        num_rows: B.
        num_columns: T.
    """

    runs: tuple[Part, ...]
    prefixes: tuple[Part, ...]
    num_rows: int
    num_columns: int

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a token that it sees, itself too."""
        whole = sum(_size(part.queries) * _size(part.keys) for part in self.prefixes)
        return whole + sum(_size(part.queries) * (_size(part.queries) + 1) // 2 for part in self.runs)


def _size(columns: slice) -> int:
    size: int = columns.stop - columns.start
    return size


def plan(
    block_start: Tensor, path_start: Tensor, attention_mask: Tensor | None = None, subtree_end: Tensor | None = None
) -> LayoutPlan:
    """
    Plan the attention of a batch.

    Args:
        block_start: (B, T) or (T,), column at which the token's block starts; 0 outside blocks.
        path_start: (B, T) or (T,), column at which the token's path starts; 0 outside blocks.
        attention_mask: (B, T) or (T,), 1 on real tokens, which are contiguous in a row; None if all are real.
        subtree_end: (B, T) or (T,), column after the last token that continues a token, for rows that consist of a
            forest of rows in depth-first order; None if each row is one.

    Raises:
        ValueError: the shapes differ, padding separates real tokens, or the ints are no valid layout.
    """
    blocks, paths = _as_rows(block_start), _as_rows(path_start)
    real = torch.ones_like(blocks) if attention_mask is None else _as_rows(attention_mask)
    ends = blocks if subtree_end is None else _as_rows(subtree_end)
    if not blocks.shape == paths.shape == real.shape == ends.shape:
        raise ValueError(
            f"shapes differ: block_start {tuple(blocks.shape)}, path_start {tuple(paths.shape)}, attention_mask"
            f" {tuple(real.shape)}, subtree_end {tuple(ends.shape)}"
        )
    runs: list[Part] = []
    prefixes: list[Part] = []
    rows = zip(blocks.tolist(), paths.tolist(), real.tolist(), ends.tolist(), strict=True)
    for row, (block_row, path_row, real_row, end_row) in enumerate(rows):
        span = _find_real_span(real_row, row)
        if subtree_end is not None:
            tree = forest.find_runs(block_row, path_row, end_row, span, row)
            runs += [Part(row, run.columns, run.columns, causal=True) for run in tree]
            prefixes += [Part(row, queries, keys, causal=False) for queries, keys in forest.pair_runs(tree)]
            continue
        found = list(_runs(block_row, path_row, span, row))
        runs += [Part(row, own, own, causal=True) for own, _ in found]
        prefixes += _prefixes(found, span.start, row)
    return LayoutPlan(tuple(runs), tuple(prefixes), *blocks.shape)


def predecessors(block_start: Tensor, path_start: Tensor) -> Tensor:
    """
    Return for each token the column whose logits predict it: (B, T) or (T,) int64, -1 for column 0.

    Args:
        block_start: (B, T) or (T,).
        path_start: (B, T) or (T,).
    """
    columns = torch.arange(block_start.shape[-1], device=block_start.device)
    starts_path = (path_start == columns) & (columns > 0)
    return torch.where(starts_path, block_start.long() - 1, columns - 1)


def _as_rows(values: Tensor) -> Tensor:
    return values[None] if values.ndim == 1 else values


def _find_real_span(real: list[int], row: int) -> slice:
    """Return the columns of a row's real tokens."""
    count = sum(map(bool, real))
    start = next((index for index, value in enumerate(real) if value), 0)
    if not all(real[start : start + count]):
        raise ValueError(f"row {row} has padding between real tokens")
    return slice(start, start + count)


def _runs(blocks: list[int], paths: list[int], span: slice, row: int) -> Iterator[tuple[slice, int]]:
    """Yield the columns of each run, and the start of its block; -1 outside blocks."""
    start = span.start
    for (block, path), group in groupby(zip(blocks[span], paths[span], strict=True)):
        stop = start + sum(1 for _ in group)
        outside = block == path == 0
        if not outside and (path != start or block > path):
            raise ValueError(
                f"row {row}: columns {start}:{stop} have path_start={path} and block_start={block}, but a path starts"
                " at its first column and not before its block"
            )
        yield slice(start, stop), -1 if outside else block
        start = stop


def _prefixes(runs: list[tuple[slice, int]], first: int, row: int) -> Iterator[Part]:
    """Yield the prefix of each run. Paths of one block have the same prefix, so they share a part."""
    for block, group in groupby(runs, key=lambda run: run[1]):
        own = [columns for columns, _ in group]
        if block >= 0:
            own, stop = [slice(own[0].start, own[-1].stop)], block
        for columns in own:
            stop = columns.start if block < 0 else stop
            if stop > first:
                yield Part(row, columns, slice(first, stop), causal=False)
