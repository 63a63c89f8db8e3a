"""
Packed batches as numpy arrays: for programs that write a batch and need no torch, which takes seconds to import.

Shapes: B rows, one per trajectory; N real tokens of all rows, M of them in responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from turnwise.batch.columns import COLUMNS, Alignment, BatchRow
from turnwise.batch.padding import join_rows
from turnwise.batch.rows import Rows, build_rows
from turnwise.record.result import EpisodeResult


@frozen(kw_only=True, eq=False)
class PackedArrays:
    """
    The columns of a `PackedBatch`, which has the same names and types.

    Attributes:
        columns: one array for each entry of `COLUMNS`, (B,), (M,) or (N,); without blocks there are no positions and no
            token indices.
        cu_seqlens: (B + 1,) int32, where rows start and end.
        prompt_lens: (B,) int64.
        rows: B of them.
        fields: the open columns of the records, by name.
        field_alignment, field_fills: as in `PackedBatch`.
    """

    columns: Mapping[str, np.ndarray]
    cu_seqlens: np.ndarray
    prompt_lens: np.ndarray
    rows: tuple[BatchRow, ...]
    fields: Mapping[str, np.ndarray]
    field_alignment: Mapping[str, Alignment]
    field_fills: Mapping[str, float]


def pack_arrays(results: Sequence[EpisodeResult]) -> PackedArrays:
    """
    Pack episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories.
    """
    return arrays_of(build_rows(results))


def arrays_of(rows: Rows) -> PackedArrays:
    """Pack rows."""
    prompt_lens = np.array(rows.prompt_lens, np.int64)
    ends = np.cumsum(prompt_lens + np.array(rows.response_lens, np.int64))
    return PackedArrays(
        columns={
            name: getattr(rows, name) if column.alignment == "row" else join_rows(rows.columns[name], column.dtype)
            for name, column in COLUMNS.items()
            if column.alignment == "row" or name in rows.columns
        },
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
        prompt_lens=prompt_lens,
        rows=rows.rows,
        fields={
            name: join_rows(each.values, each.spec.dtype, each.spec.shape) for name, each in rows.open_columns.items()
        },
        field_alignment=field_alignment(rows),
        field_fills=field_fills(rows),
    )


def field_alignment(rows: Rows) -> dict[str, Alignment]:
    """Return what the values of each open column belong to."""
    return {name: each.alignment for name, each in rows.open_columns.items()}


def field_fills(rows: Rows) -> dict[str, float]:
    """Return the fills of open columns that are not 0."""
    return {name: each.spec.fill for name, each in rows.open_columns.items() if each.spec.fill != 0}
