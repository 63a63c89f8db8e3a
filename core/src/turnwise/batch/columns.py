"""
The table of a batch's columns, and the values of a row that are no tensors.

Padded and packed batches have the same columns. The table says, for each of them, its type, the tokens that it has
values for, and the value of its pads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from attrs import field, fields, frozen
from numpy.typing import DTypeLike

from turnwise.errors import TrajectoryError
from turnwise.layout import Objective
from turnwise.record.columns import NO_VERSION
from turnwise.types import PlacedPicture, Status

if TYPE_CHECKING:
    from torch import Tensor

Alignment = Literal["row", "response", "token"]
"""A column has one value for each row, for each response token, or for each token."""


@frozen
class Column:
    """
    The type of a column, and the tokens or rows that it has values for.

    `fill` is the value of its pads; `input_ids` hold the batch's `pad_token_id` instead. Token indices move with the
    padding. `RolloutBatch.as_int64` widens a column with `is_widened`. Values are from `low` to `high`, which the
    reader of a file checks; without bounds they may be nan.
    """

    dtype: DTypeLike
    alignment: Alignment
    fill: int = 0
    is_index: bool = False
    is_widened: bool = False
    low: float | None = None
    high: float = math.inf


_LARGEST: Final = float(np.finfo(np.float32).max)
COLUMNS: Final[Mapping[str, Column]] = {
    "input_ids": Column(np.int32, "token", is_widened=True, low=0),
    "position_ids": Column(np.int32, "token", is_widened=True, low=0),
    "block_start": Column(np.int32, "token", is_index=True, low=0),
    "path_start": Column(np.int32, "token", is_index=True, low=0),
    "response_mask": Column(np.uint8, "response", is_widened=True, low=0, high=1),
    "loss_mask": Column(np.uint8, "response", is_widened=True, low=0, high=1),
    "rollout_log_probs": Column(np.float32, "response", low=-_LARGEST, high=_LARGEST),
    "rm_scores": Column(np.float32, "response"),
    "weight_versions": Column(np.int32, "response", fill=NO_VERSION, low=NO_VERSION),
    "num_turns": Column(np.int64, "row", low=0),
    "scored": Column(np.bool_, "row"),
    "episode_rewards": Column(np.float32, "row"),
}
"""The columns of every batch, by name; `Trajectory` gives those of tokens the same names."""

NO_TRAJECTORY: Final = -1
"""`BatchRow.trajectory_index` of an episode that ended before it had a prompt."""


@frozen(kw_only=True)
class BatchRow:
    """
    The values of a row that are no tensors.

    Attributes:
        uid: of the task.
        sample_index: place of the task in the data set.
        rollout_n: number of the episode within its group.
        global_step: training step that asked for it.
        validation: whether it ran for validation.
        status: how the episode ended.
        agent_name: the agent that ran it.
        data_source: name of the data set that the task came from.
        trajectory_index: number of the row within its episode, from 0; -1 for an episode without a trajectory.
        objective: how a record with blocks was sampled, see `turnwise.layout.Objective`; empty for other records.
        metrics: `EpisodeMetrics.extra` of the episode; all rows of an episode have the same.
        pictures: of the row's record, with their places among its tokens, prompt and response; no file has them.
    """

    uid: str
    sample_index: int
    rollout_n: int
    global_step: int
    validation: bool
    status: Status = field(converter=Status)
    agent_name: str
    data_source: str
    trajectory_index: int
    objective: str = ""
    metrics: Mapping[str, float] = field(factory=dict)
    pictures: tuple[PlacedPicture, ...] = ()


ROW_NAMES: Final = tuple(attribute.name for attribute in fields(BatchRow) if attribute.name != "pictures")
"""The attributes of a `BatchRow` that are plain values."""


@frozen(kw_only=True, eq=False, repr=False)
class BatchColumns:
    """
    The tensors that padded and packed batches share, one for each entry of `COLUMNS`.

    Shapes: a padded batch has (B, T) for tokens and (B, R) for response tokens, a packed one has (N,) and (M,).
    `position_ids`, which both have, are tokens, int32, from 0 in each row; the paths of a block share theirs.

    Attributes:
        input_ids: tokens, int32.
        block_start: tokens, int32, index at which the token's block starts; 0 outside blocks. Without any block, all
            entries share the memory of one, as in `path_start`.
        path_start: tokens, int32, index at which the token's own path starts; 0 outside blocks.
        response_mask: response tokens, uint8, 1 exactly on tokens that the policy sampled.
        loss_mask: response tokens, uint8, the response mask, all 0 in rows that say nothing about the policy.
        rollout_log_probs: response tokens, float32, of each sampled id when it was sampled.
        rm_scores: response tokens, float32: the episode's reward, on the tokens where the reward set it; see
            `turnwise.batch.rewards` for scores of records without a sampled token.
        weight_versions: response tokens, int32, of the weights that sampled each id; -1 elsewhere.
        num_turns: (B,) int64, unbroken runs of sampled tokens.
        scored: (B,) bool; where it is False no reward was given, which differs from a reward of 0.
        episode_rewards: (B,) float32, the sum of the episode's scores, on each of its rows; 0 where it was not scored.
        rows: B of them: the values that are no tensors.
        pad_token_id: the id of pads.
        fields: tensors that postprocessors added, and the open columns of the records, by name.
        field_fills: the value of the pads of fields where it is not 0.
        field_alignment: what the values of each field belong to. A padded batch may lack one: its shape tells it,
            unless no row has a prompt.
    """

    input_ids: Tensor
    block_start: Tensor
    path_start: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    rollout_log_probs: Tensor
    rm_scores: Tensor
    weight_versions: Tensor
    num_turns: Tensor
    scored: Tensor
    episode_rewards: Tensor
    rows: tuple[BatchRow, ...]
    pad_token_id: int
    fields: Mapping[str, Tensor] = field(factory=dict)
    field_fills: Mapping[str, float] = field(factory=dict)
    field_alignment: Mapping[str, Alignment] = field(factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Return shapes and names alone, for notebooks."""
        shape, fields = tuple(self.input_ids.shape), list(self.fields)
        return f"{type(self).__name__}(rows={len(self)}, input_ids={shape}, fields={fields})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The shared tensors by name, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    @property
    def group_index(self) -> Tensor:
        """(B,) int64: the group of each row, from 0 in order of appearance; one task at one step is one group."""
        return _number_keys((row.uid, row.global_step, row.validation) for row in self.rows)

    @property
    def episode_index(self) -> Tensor:
        """(B,) int64: the episode of each row, from 0 in order of appearance; its trajectories and paths are rows."""
        return _number_keys((row.uid, row.global_step, row.validation, row.rollout_n) for row in self.rows)

    @property
    def line_index(self) -> Tensor:
        """
        (B,) int64: the line of each row, from 0 in order of appearance.

        The rows of an episode follow each other in time and are one line. Rows that were expanded from parallel paths
        do not: each row of such an episode is a line.
        """
        episodes = self.episode_index.tolist()
        pairs = zip(episodes, self.column("objective"), strict=True)
        expanded = {episode for episode, objective in pairs if objective == Objective.EXPANDED}
        return _number_keys((each, row if each in expanded else -1) for row, each in enumerate(episodes))

    def column(self, name: str) -> list[Any]:
        """Return the B values of one attribute of `rows`, such as `uid`."""
        return [getattr(row, name) for row in self.rows]


def _number_keys(keys: Iterable[object]) -> Tensor:
    """Return a number for each key, from 0 in order of appearance."""
    import torch

    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def check_one_objective(rows: Sequence[BatchRow]) -> None:
    """Raise `TrajectoryError` when rows sampled under a layout and expanded rows are in one batch."""
    if len({row.objective for row in rows} - {""}) > 1:
        raise TrajectoryError(
            "a batch holds rows sampled under a layout and rows expanded for an engine without: train them apart"
        )
