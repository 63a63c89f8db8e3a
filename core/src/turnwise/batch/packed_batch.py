"""
Packed batches: the real tokens of many rows end to end.

Their size grows with the number of real tokens, whatever the longest row is. `turnwise.batch.rollout_batch` pads them.

Shapes: B rows, one per trajectory; N real tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from turnwise.batch.columns import COLUMNS, ROW_NAMES, Alignment, BatchColumns
from turnwise.batch.packed_arrays import pack_arrays
from turnwise.errors import DuplicateNameError, PluginError, TrajectoryError
from turnwise.record.result import EpisodeResult

if TYPE_CHECKING:
    from torch import Tensor

_PADDED_NAMES: Final = frozenset(
    {
        *("attention_mask", "prompt_length", "response_length", "prompts", "responses", "visibility", "select"),
        *("packed", "from_packed"),
    }
)
"""Attributes of padded batches alone, which no field may hide when the batch is padded."""


@frozen(kw_only=True, eq=False, repr=False)
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

    def __attrs_post_init__(self) -> None:
        sizes = {"row": len(self), "response": len(self.input_ids), "token": len(self.input_ids)}
        alignments = {name: column.alignment for name, column in COLUMNS.items()}
        for name, alignment in (alignments | {"prompt_lens": "row"}).items():
            if getattr(self, name).shape != (sizes[alignment],):
                raise TrajectoryError(f"{name} has shape {list(getattr(self, name).shape)}, not [{sizes[alignment]}]")
        ends = self.cu_seqlens.tolist()
        if len(ends) != len(self) + 1 or (ends[0], ends[-1]) != (0, sizes["token"]) or self._has_negative_lens():
            raise TrajectoryError(f"cu_seqlens does not bound {len(self)} rows of {sizes['token']} tokens")

    def _has_negative_lens(self) -> bool:
        return any(bool((lens < 0).any()) for lens in (self.prompt_lens, self.response_lens))

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens

    def split(self, column: Tensor) -> tuple[Tensor, ...]:
        """Return views of an (N, ...) column, one for each row: its prompt, then its response."""
        return column.split_with_sizes(self.cu_seqlens.diff().tolist())

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
        prompt_lens = self.prompt_lens.tolist()
        if lens == self.response_lens.tolist():
            rows = [(each.new_zeros((n, *each.shape[1:])), each) for n, each in zip(prompt_lens, values, strict=True)]
            return torch.cat([part for row in rows for part in row] or [torch.zeros(0)]), "response"
        if lens == self.cu_seqlens.diff().tolist():
            return torch.cat(list(values)), "token"
        wanted = f"{len(self)}, with a value for each token of a row or for each of its response tokens"
        raise PluginError(f"field {name!r} has {len(lens)} tensors of lengths {lens[:4]}, expected {wanted}")


def collate_packed(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Make a packed batch of episodes, one row per trajectory, in their order; see `turnwise.batch.rows.build_rows`.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories.
    """
    import torch

    arrays = pack_arrays(results)
    columns: dict[str, Any] = {
        # torch takes no array whose values share their memory.
        name: torch.from_numpy(values if values.flags.writeable else values[:1].copy()).expand(len(values))
        for name, values in arrays.columns.items()
    }
    return PackedBatch(
        **columns,
        cu_seqlens=torch.from_numpy(arrays.cu_seqlens),
        prompt_lens=torch.from_numpy(arrays.prompt_lens),
        rows=arrays.rows,
        pad_token_id=pad_token_id,
    )
