"""
The layout of a record with parallel paths: the runs of tokens that are paths, and the block of each.

Positions and visibility follow from it. A request to an engine carries a `Layout`; a trainer has the same as two ints
per token. Nothing here knows records, text or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import groupby, pairwise

import numpy as np
from attrs import Attribute, field, frozen
from numpy.typing import ArrayLike, NDArray

Run = tuple[int, int, int]
"""A path: index at which its block starts, index of its first token, index after its last one."""


class Objective(StrEnum):
    """
    The way of sampling records with blocks, and the rows that a trainer gets for them.

    `EXACT`: the engine accepts layouts, and one row is trained under the layout that it was sampled under. `EXPANDED`:
    the engine sees plain text. Each path, and the text after a block, is trained in a separate row, in the context that
    the engine saw.
    """

    EXACT = "exact"
    EXPANDED = "expanded"


def _runs(paths: Iterable[Iterable[int]]) -> tuple[Run, ...]:
    return tuple((int(block), int(start), int(stop)) for block, start, stop in paths)


@frozen
class Layout:
    """
    The places of the paths of a context; every other token sees all tokens before it.

    Attributes:
        paths: (block start, start, stop) of each path that has tokens, in order of the tokens. The paths of a block
            follow one another without gap, the first one at the block's start.
    """

    paths: tuple[Run, ...] = field(default=(), converter=_runs)

    @paths.validator
    def _check_paths(self, _attribute: Attribute[tuple[Run, ...]], paths: tuple[Run, ...]) -> None:
        last_block, last_stop = -1, 0
        for block, start, stop in paths:
            follows = start == last_stop if block == last_block else start == block >= last_stop
            if not follows or stop <= start:
                raise ValueError(f"path {(block, start, stop)} does not follow the path that ends at token {last_stop}")
            last_block, last_stop = block, stop

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of the last path: the fewest that a context of this layout has."""
        return self.paths[-1][2] if self.paths else 0

    def columns(self, num_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """
        Return position_ids, block_start, path_start: each (num_tokens,) int32, as in `turnwise.record.trajectory`.

        Raises a `ValueError` when a path ends after the context.
        """
        if num_tokens < self.num_tokens:
            raise ValueError(f"the layout has a path that ends at {self.num_tokens}, after {num_tokens} tokens")
        block_starts, path_starts = (np.zeros(num_tokens, np.int32) for _ in range(2))
        # Each token is one position after the last; paths after the first restart at the position of their block.
        steps = np.ones(num_tokens + 1, np.int32)
        for block, group in groupby(self.paths, key=lambda run: run[0]):
            runs = list(group)
            for (_, start, stop), (_, following, _) in pairwise(runs):
                steps[following] -= stop - start
            steps[runs[-1][2]] += max(stop - start for _, start, stop in runs) - (runs[-1][2] - runs[-1][1])
            for _, start, stop in runs:
                block_starts[start:stop], path_starts[start:stop] = block, start
        return np.cumsum(steps[:-1], dtype=np.int32) - 1, block_starts, path_starts


def visible_keys(
    block_start: NDArray[np.int32], path_start: NDArray[np.int32], queries: ArrayLike
) -> NDArray[np.bool_]:
    """
    Return (Q, T) bool: the tokens that some tokens see.

    `block_start` and `path_start` are (T,), of the whole context; `queries` are (Q,) indices of tokens.
    """
    rows = np.asarray(queries)[:, None]
    keys = np.arange(len(block_start))
    seen: NDArray[np.bool_] = (keys <= rows) & ((keys < block_start[rows]) | (keys >= path_start[rows]))
    return seen
