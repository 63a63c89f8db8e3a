"""
Packed batches: the columns of many rows end to end, without a single pad.

Shapes: B rows, one per trajectory; N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from turnwise.batch.columns import COLUMNS, Alignment, BatchColumns, Column, check_one_objective
from turnwise.batch.rows import Rows, build_rows
from turnwise.errors import TrajectoryError
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True, eq=False)
class PackedBatch(BatchColumns):
    """
    Rows end to end; row b is ``cu_seqlens[b]:cu_seqlens[b + 1]``, its prompt first. A row may have no tokens.

    All columns of tokens and of response tokens are (N,); those of response tokens hold their pad value on prompts.
    `block_start` and `path_start` count within the row, as in the `Trajectory`.

    Attributes:
        cu_seqlens: (B + 1,) int32, where rows start and end.
        prompt_lens: (B,) int64.
        field_alignment: what the values of each field belong to. Fields are (B,) or (N, ...); those of response tokens
            hold 0 on prompts.
    """

    cu_seqlens: Tensor
    prompt_lens: Tensor
    field_alignment: Mapping[str, Alignment] = field(factory=dict)

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens


def pack(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Pack the trajectories of episodes, in the order of the episodes.

    Args:
        results: finished episodes; see `turnwise.batch.rows.build_rows`.
        pad_token_id: for padding the batch later.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    import torch

    rows = build_rows(results)
    prompt_lens = np.array(rows.prompt_lens, np.int64)
    arrays: dict[str, NDArray[Any]] = {
        **{name: _pack_column(rows, name, column) for name, column in COLUMNS.items() if column.alignment != "row"},
        "cu_seqlens": np.concatenate([[0], np.cumsum(prompt_lens + rows.response_lens)]).astype(np.int32),
        "prompt_lens": prompt_lens,
        "num_turns": rows.num_turns,
        "scored": rows.scored,
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return PackedBatch(**tensors, rows=rows.rows, pad_token_id=pad_token_id)


def concat_packed(parts: Sequence[PackedBatch]) -> PackedBatch:
    """
    Put the rows of packed batches after one another.

    Raises:
        TrajectoryError: there is no batch, or they differ in pad id or fields.
    """
    import torch

    if len({(part.pad_token_id, *sorted(part.field_alignment.items())) for part in parts}) != 1:
        raise TrajectoryError("concat takes at least one batch, and all of one pad id and with the same fields")
    check_one_objective([row for part in parts for row in part.rows])
    lens = torch.cat([parts[0].cu_seqlens[:1], *(part.cu_seqlens.diff() for part in parts)])
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in (*COLUMNS, "prompt_lens")
    }
    return evolve(
        parts[0],
        **joined,
        cu_seqlens=lens.cumsum(0).int(),
        rows=tuple(row for part in parts for row in part.rows),
        fields={name: torch.cat([part.fields[name] for part in parts]) for name in parts[0].fields},
    )


def _pack_column(rows: Rows, name: str, column: Column) -> NDArray[Any]:
    """Return one column, (N,); a column of response tokens holds its fill on prompts."""
    pieces = rows.columns[name]
    if column.alignment == "response":
        prompt = np.full(max(rows.prompt_lens, default=0), column.fill, column.dtype)
        pairs = zip(rows.prompt_lens, pieces, strict=True)
        pieces = [piece for size, response in pairs for piece in (prompt[:size], response)]
    # The empty array gives a batch of no rows its type.
    return np.concatenate([np.empty(0, column.dtype), *pieces], dtype=column.dtype, casting="unsafe")
