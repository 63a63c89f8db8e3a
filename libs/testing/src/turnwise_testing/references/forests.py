"""
The slow truth about rows that share prefixes: a tree of dictionaries, and a whole matrix of visibility.

The reference for layouts in which a shared prefix is forwarded once. It takes L x L memory for L tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.record.trajectory import Trajectory
from turnwise_testing.references.dense import visibility

Row = Sequence[Hashable]


@frozen
class ForestReference:
    """
    Rows in one line, in depth-first order.

    Attributes:
        places: for each row the column of each token.
        subtree_end: (L,) the column after the last token that continues the token of a column.
        block_start: (L,) the column at which the token's block starts; 0 outside blocks.
        path_start: (L,) the column at which the token's path starts; 0 outside blocks.
        visible: (L, L) bool: whether the token of a row sees the token of a column.
    """

    places: list[list[int]]
    subtree_end: NDArray[np.int64]
    block_start: NDArray[np.int64]
    path_start: NDArray[np.int64]
    visible: NDArray[np.bool_]


@frozen
class _Node:
    children: dict[Hashable, _Node] = field(factory=dict)
    rows: list[int] = field(factory=list)


def merge_records(records: Sequence[Trajectory]) -> ForestReference:
    """Return the forest of some records; equal tokens at equal positions and places in blocks are one."""
    names = ("input_ids", "position_ids", "block_start", "path_start")
    rows = [list(zip(*(getattr(record, name).tolist() for name in names), strict=True)) for record in records]
    places, ends = place_rows(rows)
    size = len(ends)
    visible = np.zeros((size, size), bool)
    layout = np.zeros((2, size), np.int64)
    for record, at in zip(records, places, strict=True):
        visible[np.ix_(at, at)] |= visibility(record)
        for target, starts in zip(layout, (record.block_start, record.path_start), strict=True):
            inside = record.path_start > 0
            target[np.array(at, np.int64)[inside]] = np.array(at, np.int64)[starts[inside]]
    return ForestReference(places, ends, layout[0], layout[1], visible)


def place_rows(rows: Sequence[Row]) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Return the columns of each row's tokens, and the end of the subtree of each column."""
    root = _Node()
    for number, row in enumerate(rows):
        node = root
        for token in row:
            node = node.children.setdefault(token, _Node())
            node.rows.append(number)
    places: list[list[int]] = [[] for _ in rows]
    ends: dict[int, int] = {}
    count = 0
    todo: list[tuple[Iterator[_Node], int]] = [(iter(list(root.children.values())), -1)]
    while todo:
        children, column = todo[-1]
        child = next(children, None)
        if child is None:
            todo.pop()
            ends[column] = count
            continue
        for owner in child.rows:
            places[owner].append(count)
        todo.append((iter(list(child.children.values())), count))
        count += 1
    return places, np.array([ends[column] for column in range(count)], np.int64)
