"""
Plans the attention of a forest: rows that share prefixes, in one line, each shared token once.

The tokens are in depth-first order, and `subtree_end[k]` is the column after the last token that continues token k:

``visible(q, k) = k <= q < subtree_end[k] and (k < block_start[q] or k >= path_start[q])``

So a token sees its ancestors and itself, without the sibling paths of a block among them. A row alone is the case in
which each token's subtree ends with the row. The second condition is no interval of this kind: the text after a block
sees all paths, which do not see each other, and two intervals with a common element and neither one's start in the
other do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from attrs import frozen


@frozen
class Run:
    """
    Consecutive tokens that see the same tokens before the run, and are seen by the same tokens after it.

    Attributes:
        columns: of the tokens.
        end: column at which their subtree ends.
        block: column at which their block starts; 0 outside blocks.
        path: column at which their path starts; 0 outside blocks.
    """

    columns: slice
    end: int
    block: int
    path: int

    def hides(self, key: int) -> bool:
        """Return whether a token before the run is in a sibling path."""
        return self.block <= key < self.path


def find_runs(blocks: list[int], paths: list[int], ends: list[int], span: slice, row: int) -> list[Run]:
    """
    Return the runs of a row's real tokens, `span`; all lists have an int for each column.

    Raises:
        ValueError: the subtrees are no forest, or a path starts after its tokens or before its block.
    """
    runs = []
    start = span.start
    open_ends: list[int] = []
    for (block, path, end), group in groupby(zip(blocks[span], paths[span], ends[span], strict=True)):
        stop = start + sum(1 for _ in group)
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not stop <= end <= (open_ends[-1] if open_ends else span.stop):
            raise ValueError(
                f"row {row}: columns {start}:{stop} have subtree_end={end}, but a subtree contains its tokens and ends"
                " within the subtrees around it"
            )
        if not block <= path <= start:
            raise ValueError(
                f"row {row}: columns {start}:{stop} have path_start={path} and block_start={block}, but a path starts"
                " at its first column and not before its block"
            )
        open_ends.append(end)
        runs.append(Run(slice(start, stop), end, block, path))
        start = stop
    return runs


def pair_runs(runs: list[Run]) -> Iterator[tuple[slice, slice]]:
    """
    Yield ranges of queries and of keys before them, such that each query sees all keys.

    With the causal attention of each run to itself, these pairs contain every visible pair of tokens once.
    """
    pending: tuple[slice, list[slice]] | None = None
    has_paths = any(run.path for run in runs)
    for number, run in enumerate(runs):
        queries = _later_queries(runs, number) if has_paths else _subtree_without(run)
        if pending is not None and pending[1] == queries and pending[0].stop == run.columns.start:
            pending = slice(pending[0].start, run.columns.stop), queries
            continue
        if pending is not None:
            yield from ((each, pending[0]) for each in pending[1])
        pending = run.columns, queries
    if pending is not None:
        yield from ((each, pending[0]) for each in pending[1])


def _subtree_without(run: Run) -> list[slice]:
    return [slice(run.columns.stop, run.end)] if run.end > run.columns.stop else []


def _later_queries(runs: list[Run], number: int) -> list[slice]:
    """Return the columns after a run that see it."""
    run = runs[number]
    found: list[slice] = []
    for later in runs[number + 1 :]:
        if later.columns.start >= run.end:
            break
        if later.hides(run.columns.start):
            continue
        if found and found[-1].stop == later.columns.start:
            found[-1] = slice(found[-1].start, later.columns.stop)
        else:
            found.append(later.columns)
    return found
