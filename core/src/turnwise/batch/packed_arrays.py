"""
Packed batches as numpy arrays: for programs that write a batch and need no torch, which takes seconds to import.

Shapes: B rows, one per trajectory; N real tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from turnwise.batch.columns import COLUMNS, BatchRow, Column
from turnwise.batch.padding import Padding
from turnwise.batch.rows import build_rows
from turnwise.record.result import EpisodeResult


@frozen(kw_only=True, eq=False)
class PackedArrays:
    """
    The columns of a `PackedBatch`, which has the same names and types.

    Attributes:
        columns: one array for each entry of `COLUMNS`, (B,) or (N,), in its packed type. Token indices that are all 0,
            as without blocks, take the memory of one.
        cu_seqlens: (B + 1,) int32, where rows start and end.
        prompt_lens: (B,) int64.
        rows: B of them.
    """

    columns: Mapping[str, np.ndarray]
    cu_seqlens: np.ndarray
    prompt_lens: np.ndarray
    rows: tuple[BatchRow, ...]


def pack_arrays(results: Sequence[EpisodeResult]) -> PackedArrays:
    """
    Pack episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories.
    """
    rows = build_rows(results)
    padding = Padding.fitting(rows.prompt_lens, rows.response_lens)
    columns = {
        name: getattr(rows, name) if column.alignment == "row" else _pack(padding, rows.columns[name], column)
        for name, column in COLUMNS.items()
    }
    prompt_lens = np.array(rows.prompt_lens, np.int64)
    ends = np.cumsum(prompt_lens + np.array(rows.response_lens, np.int64))
    return PackedArrays(
        columns=columns,
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
        prompt_lens=prompt_lens,
        rows=rows.rows,
    )


def _pack(padding: Padding, rows: Sequence[np.ndarray], column: Column) -> np.ndarray:
    values = padding.pack_rows(rows, column.alignment, column.packed_dtype, column.fill)
    if column.is_index and not values.any():
        return np.broadcast_to(np.zeros(1, values.dtype), values.shape)
    return values
