"""
Packed batches: the real tokens of many rows end to end.

Their size grows with the number of real tokens, whatever the longest row is. `turnwise.batch.rollout_batch` pads them.

Shapes: B rows, one per trajectory; N real tokens of all rows, M of them in responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns
from turnwise.batch.packed_arrays import arrays_of
from turnwise.batch.rows import Rows, build_rows
from turnwise.errors import DuplicateNameError, PluginError, TrajectoryError
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from torch import Tensor

_PADDED_NAMES: Final = frozenset(
    {
        *("attention_mask", "prompt_length", "response_length", "prompts", "responses", "visibility", "select"),
        *("packed", "from_packed", "from_rows", "as_int64"),
    }
)
"""Attributes of padded batches alone, which no field may hide when the batch is padded."""


@frozen(kw_only=True, eq=False, repr=False)
class PackedBatch(BatchColumns):
    """
    Rows end to end; row b is ``cu_seqlens[b]:cu_seqlens[b + 1]``, its prompt first. A row may have no tokens.

    Columns of tokens are (N,). Columns of response tokens are (M,), the responses end to end: prompts have no entry in
    them. `split` cuts either into rows. `block_start` and `path_start` count within the row, as in the `Trajectory`.
    Fields are (B,), (M, ...) or (N, ...), and `field_alignment` has each of them.

    Attributes:
        cu_seqlens: (B + 1,) int32, where rows start and end.
        prompt_lens: (B,) int64.
        block_positions: (N,) int32, `position_ids` of a batch with blocks; None in one without, where they follow from
            `cu_seqlens`.
    """

    cu_seqlens: Tensor
    prompt_lens: Tensor
    block_positions: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        total, ends = len(self.input_ids), self.cu_seqlens.tolist()
        if len(ends) != len(self) + 1 or (ends[0], ends[-1]) != (0, total) or self._has_negative_lens():
            raise TrajectoryError(f"cu_seqlens does not bound {len(self)} rows of {total} tokens")
        sizes = {"row": len(self), "response": total - int(self.prompt_lens.sum()), "token": total}
        for name, tensor in (self.tensors | {"prompt_lens": self.prompt_lens}).items():
            size = sizes[COLUMNS[name].alignment if name in COLUMNS else "row"]
            if tensor.shape != (size,):
                raise TrajectoryError(f"{name} has shape {list(tensor.shape)}, not [{size}]")

    def _has_negative_lens(self) -> bool:
        return any(bool((lens < 0).any()) for lens in (self.prompt_lens, self.response_lens))

    @property
    def position_ids(self) -> Tensor:
        """(N,) int32: positions, from 0 in each row; computed at each access in a batch without blocks."""
        return count_positions(self.cu_seqlens) if self.block_positions is None else self.block_positions

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens

    def split(self, column: Tensor) -> tuple[Tensor, ...]:
        """Return views of an (N, ...) or (M, ...) column, one for each row: of its tokens, or of its response."""
        whole = len(column) == len(self.input_ids)  # M is equal to N only if no row has a prompt
        return column.split_with_sizes((self.cu_seqlens.diff() if whole else self.response_lens).tolist())

    def with_fields(self, new: Mapping[str, Tensor | Sequence[Tensor]]) -> PackedBatch:
        """
        Return a batch with additional fields.

        Args:
            new: name to a (B,) tensor; or to a sequence of B tensors, one for each row, with a value for each token of
                the row or for each of its response tokens.

        Raises:
            DuplicateNameError: the batch, a `BatchRow` or another field has the name.
            PluginError: the values do not fit the rows.
        """
        fields, alignments = dict(self.fields), dict(self.field_alignment)
        for name, values in new.items():
            if name in fields or name in _PADDED_NAMES or name in ROW_NAMES or hasattr(self, name):
                raise DuplicateNameError(f"field {name!r}: the batch already has an attribute or a field of that name")
            fields[name], alignments[name] = self._align(name, values)
        return evolve(self, fields=fields, field_alignment=alignments)

    def _align(self, name: str, values: Tensor | Sequence[Tensor]) -> tuple[Tensor, Alignment]:
        """Return a field as it is kept, and the alignment of its values."""
        import torch

        if isinstance(values, torch.Tensor):
            if values.shape == (len(self),):
                return values, "row"
            raise PluginError(f"field {name!r} has shape {tuple(values.shape)}, expected ({len(self)},)")
        lens = [each.shape[0] if each.ndim else -1 for each in values]
        alignments: dict[Alignment, Tensor] = {"response": self.response_lens, "token": self.cu_seqlens.diff()}
        for alignment, wanted_lens in alignments.items():
            if lens == wanted_lens.tolist():
                return torch.cat(list(values) or [torch.zeros(0)]), alignment
        wanted = f"{len(self)}, with a value for each token of a row or for each of its response tokens"
        raise PluginError(f"field {name!r} has {len(lens)} tensors of lengths {lens[:4]}, expected {wanted}")


def collate_packed(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Make a packed batch of episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories.
    """
    return pack_rows(build_rows(results), pad_token_id=pad_token_id)


def pack_rows(rows: Rows, *, pad_token_id: int) -> PackedBatch:
    """Make a packed batch of rows."""
    import torch

    arrays = arrays_of(rows)
    columns: dict[str, Any] = {name: torch.from_numpy(values) for name, values in arrays.columns.items()}
    positions = columns.pop("position_ids", None)
    if positions is None:
        columns |= no_layout(len(arrays.columns["input_ids"]))
    return PackedBatch(
        **columns,
        block_positions=positions,
        cu_seqlens=torch.from_numpy(arrays.cu_seqlens),
        prompt_lens=torch.from_numpy(arrays.prompt_lens),
        rows=arrays.rows,
        pad_token_id=pad_token_id,
        fields={name: torch.from_numpy(values) for name, values in arrays.fields.items()},
        field_alignment=arrays.field_alignment,
        field_fills=arrays.field_fills,
    )


def no_layout(*shape: int) -> dict[str, Tensor]:
    """Return the index columns of a batch without blocks, of a shape: all entries share the memory of one."""
    import torch

    nothing = torch.zeros((1,) * len(shape), dtype=torch.int32)
    return {name: nothing.expand(shape) for name, column in COLUMNS.items() if column.is_index}


def count_positions(cu_seqlens: Tensor) -> Tensor:
    """Return (N,) int32 positions of rows without blocks, which start and end at (B + 1,) `cu_seqlens`."""
    import torch

    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return torch.arange(len(starts), dtype=torch.int32, device=starts.device) - starts
