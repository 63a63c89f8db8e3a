"""
Micro-batches: rows grouped by a token budget and collated for a model.

Packed or padded, every token attends to the same tokens and has the same position. For rows with parallel paths, a
dense mask encodes the visibility; for all others the model's causal mask does.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen
from torch import Tensor

from turnwise_grpo_trainer.objective.picture_rows import picture_inputs
from turnwise_grpo_trainer.objective.rows import FORWARD_COLUMNS, TokenRows


@frozen(eq=False)
class MicroBatch:
    """
    The input of one forward pass. b rows of L columns; packed, b is 1. M tokens are in the loss, C columns predict
    them.

    Attributes:
        input_ids: (b, L) int64.
        position_ids: (b, L) int64. Positions continue over the pads, because transformers treats a jump as the start of
            another sequence.
        block_start: (b, L) int64, the column at which a token's block starts; 0 outside blocks.
        path_start: (b, L) int64, the column at which a token's path starts; 0 outside blocks.
        row_ids: (b, L) int64, the row of each column; -1 on pads.
        keep: (C,) int64, the columns whose output is needed.
        predictors: (2, M) int64: the row of each token, and the index of its predictor in `keep`.
        labels: (M,) int64, the token ids.
        tokens: (M,) int64, the tokens' positions in the `TokenRows`.
        packed: whether rows are concatenated.
        has_blocks: whether any token is in a path.
        subtree_end: (1, L) int64 of a forest of rows that share prefixes: the column after the last token that
            continues a token; None if each token belongs to one row.
        axes: (3, b, L) int64 positions in time, height and width, for a model that has these axes.
        is_picture: (b, L) bool, True on placeholders of pictures; None without pictures.
        pictures: arguments of the model for all pictures, in the order of their placeholders, by name.
        replayed: (b, L, ...) values of the forward columns that replays read, by name; -1 on pads.
    """

    input_ids: Tensor
    position_ids: Tensor
    block_start: Tensor
    path_start: Tensor
    row_ids: Tensor
    keep: Tensor
    predictors: Tensor
    labels: Tensor
    tokens: Tensor
    packed: bool
    has_blocks: bool
    subtree_end: Tensor | None = None
    axes: Tensor | None = None
    is_picture: Tensor | None = None
    pictures: Mapping[str, Tensor] = field(factory=dict)
    replayed: Mapping[str, Tensor] = field(factory=dict)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in asdict(self, recurse=False).items() if isinstance(value, Tensor)
        }
        for name in ("pictures", "replayed"):
            moved[name] = {key: each.to(device) for key, each in getattr(self, name).items()}
        return evolve(self, **moved)

    @property
    def real(self) -> Tensor:
        """(b, L) int64: 1 on tokens, 0 on pads."""
        return (self.row_ids >= 0).long()

    @property
    def needs_layout(self) -> bool:
        """Whether a causal mask of each row is not enough."""
        return self.has_blocks or self.subtree_end is not None

    def attention_mask(self) -> Tensor | None:
        """
        Return (b, 1, L, L) bool, True where the key is visible; pads see only pads.

        None without blocks in separate rows. The model's causal mask is then enough: it restarts where positions
        restart, and pads come after all tokens, which therefore never see them.
        """
        if not self.needs_layout:
            return None
        key = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        outside = (key < self.block_start[:, :, None]) | (key >= self.path_start[:, :, None])
        same_row = self.row_ids[:, :, None] == self.row_ids[:, None, :]
        visible = outside & (key <= key[:, None]) & same_row
        if self.subtree_end is not None:
            visible &= key[:, None] < self.subtree_end[:, None, :]
        return visible[:, None]


def shard(rows: TokenRows, num_shards: int, chosen: Sequence[int] | None = None) -> list[list[int]]:
    """
    Split the rows with a token in the loss among processes, round-robin in order of length, longest first.

    `chosen` are the rows to split; None takes all.
    """
    lengths = rows.lengths
    trained = torch.bincount(rows.row_index[rows.targets], minlength=len(rows)).tolist()
    candidates = range(len(rows)) if chosen is None else chosen
    order = sorted((row for row in candidates if trained[row]), key=lambda row: (-lengths[row], row))
    return [order[number::num_shards] for number in range(num_shards)]


def pack_by_tokens(rows: TokenRows, order: Sequence[int], *, max_tokens: int, packed: bool) -> list[list[int]]:
    """
    Group rows into micro-batches of at most `max_tokens` tokens.

    Args:
        rows: the rows.
        order: indices of rows, longest first.
        max_tokens: the budget, including pads and the patches of pictures; a longer row is a group by itself.
        packed: whether rows are concatenated, or padded to the longest of their group.
    """
    lengths, sizes = rows.lengths, rows.sizes
    groups: list[list[int]] = []
    size = 0
    for row in order:
        # Padded, a further row has as many columns as the longest; its pictures are not padded.
        new = sizes[row] if packed or not groups else lengths[groups[-1][0]] + sizes[row] - lengths[row]
        if groups and size + new <= max_tokens:
            groups[-1].append(row)
            size += new
        else:
            groups.append([row])
            size = sizes[row]
    return groups


def collate(rows: TokenRows, group: Sequence[int], *, packed: bool) -> MicroBatch:
    """Return some rows as one micro-batch, concatenated (`packed`) or padded on the right."""
    chosen = rows.select(group)
    lengths = torch.tensor(chosen.lengths, dtype=torch.int64)
    owner, starts = chosen.row_index, torch.tensor(chosen.bounds[:-1], dtype=torch.int64)
    index = torch.arange(chosen.num_tokens)
    row, column = (torch.zeros_like(owner), index) if packed else (owner, index - starts[owner])
    shape = (1, chosen.num_tokens) if packed else (len(chosen), int(lengths.max()))

    def scatter(values: Tensor, fill: int = 0) -> Tensor:
        filled = torch.full(shape, fill, dtype=torch.int64)
        filled[row, column] = values.long()
        return filled

    positions = scatter(chosen["position_ids"])
    if not packed:
        beyond = torch.arange(shape[1]) - lengths[:, None] + 1
        last = positions.gather(1, lengths[:, None] - 1)
        positions = torch.where(beyond > 0, last + beyond, positions)
    inside = chosen["path_start"] > 0
    shift = inside * starts[owner] if packed else torch.zeros_like(owner)
    return MicroBatch(
        input_ids=scatter(chosen["input_ids"]),
        position_ids=positions,
        block_start=scatter(chosen["block_start"] + shift),
        path_start=scatter(chosen["path_start"] + shift),
        row_ids=scatter(owner, fill=-1),
        **index_targets(rows, group, row, column),
        packed=packed,
        has_blocks=bool(inside.any()),
        **picture_inputs(chosen, positions, scatter),
        replayed=scatter_replayed(chosen, row, column, shape),
    )


def scatter_replayed(rows: TokenRows, row: Tensor, column: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return `replayed` of a micro-batch of a shape, in which each token of some rows has a row and a column."""
    found = {}
    for name in rows.forward_columns:
        if name not in FORWARD_COLUMNS:
            found[name] = rows[name].new_full((*shape, *rows[name].shape[1:]), -1)
            found[name][row, column] = rows[name]
    return found


def index_targets(rows: TokenRows, group: Sequence[int], row: Tensor, column: Tensor) -> dict[str, Any]:
    """
    Return `keep`, `predictors`, `labels` and `tokens` of a micro-batch.

    Args:
        rows: all rows.
        group: indices of the rows in the micro-batch.
        row: (N,) of each token of the group, its row in the micro-batch.
        column: (N,) its column.
    """
    chosen = rows.select(group)
    targets = chosen.targets
    predictors = chosen.predictors[targets]
    keep, places = torch.unique(column[predictors], return_inverse=True)
    return {
        "keep": keep,
        "predictors": torch.stack([row[predictors], places]),
        "labels": chosen["input_ids"][targets],
        "tokens": torch.cat([torch.arange(rows.bounds[each], rows.bounds[each + 1]) for each in group])[targets],
    }
