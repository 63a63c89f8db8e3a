"""
Trajectories end to end: the columns of many episodes without a single pad.

This is the form that all others are made from. Copies run over whole rows; no Python loop runs over tokens.

Shapes: B rows, one per trajectory; N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import evolve, field, fields, frozen
from numpy.typing import DTypeLike, NDArray

from turnwise.errors import TrajectoryError
from turnwise.expansion import expanded
from turnwise.layout import Objective
from turnwise.padding import Alignment, Padding
from turnwise.record import NO_VERSION
from turnwise.result import EpisodeResult, token_scores
from turnwise.trajectory import Trajectory
from turnwise.types import FloatArray, Score, Status

if TYPE_CHECKING:
    from torch import Tensor

NO_TRAJECTORY: Final = -1
"""`BatchRow.trajectory_index` of an episode that ended before it had a prompt."""

TOKEN_DTYPES: Final[Mapping[str, DTypeLike]] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "block_start": np.int32,
    "path_start": np.int32,
}
"""Columns with a value for every token, named as `Trajectory` names them."""

RESPONSE_DTYPES: Final[Mapping[str, DTypeLike]] = {
    "response_mask": np.int64,
    "loss_mask": np.int64,
    "rollout_log_probs": np.float32,
    "rm_scores": np.float32,
    "weight_versions": np.int32,
}
"""Columns with a value for every response token; `FILLS` stands where there is none."""

FILLS: Final[Mapping[str, int]] = {"weight_versions": NO_VERSION}
"""What pads hold, where it is not 0."""


@frozen(kw_only=True)
class BatchRow:
    """
    What a row of a batch is, besides its tensors; plain values only.

    Attributes:
        uid: of the task.
        sample_index: place of the task in the data set.
        rollout_n: which of its group's episodes this is.
        global_step: training step that asked for it.
        validation: whether it ran for validation.
        status: how the episode ended.
        agent_name: the agent that ran it.
        data_source: name of the data set that the task came from.
        trajectory_index: which of its episode's rows this is, from 0; -1 for an episode that has no trajectory.
        objective: how a record with blocks was sampled, see `turnwise.layout.Objective`; empty for other records.
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


def rows_of(columns: Mapping[str, Sequence[Any]], size: int) -> tuple[BatchRow, ...]:
    """Make rows of columns of plain values, each of `size` of them."""
    names = [attribute.name for attribute in fields(BatchRow)]
    return tuple(BatchRow(**{name: columns[name][i] for name in names}) for i in range(size))


def group_index(rows: Sequence[BatchRow]) -> list[int]:
    """Number the GRPO groups of B rows, from 0 in order of appearance: one task at one step is one group."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault((row.uid, row.global_step, row.validation), len(numbers)) for row in rows]


@frozen(kw_only=True, eq=False)
class PackedBatch:
    """
    Rows end to end; row b is ``cu_seqlens[b]:cu_seqlens[b + 1]``, its prompt first. A row may have no tokens.

    Attributes:
        input_ids: (N,) int64.
        position_ids: (N,) int64, beginning at 0 in each row; the paths of a block share theirs.
        block_start: (N,) int32, index within the row, as in the `Trajectory`.
        path_start: (N,) int32, index within the row, as in the `Trajectory`.
        response_mask: (N,) int64, 1 exactly on tokens that the policy sampled; 0 on prompts.
        loss_mask: (N,) int64.
        rollout_log_probs: (N,) float32.
        rm_scores: (N,) float32.
        weight_versions: (N,) int32, -1 where no policy sampled.
        cu_seqlens: (B + 1,) int32, where rows begin and end.
        prompt_lens: (B,) int64.
        num_turns: (B,) int64.
        scored: (B,) bool.
        rows: B of them.
        pad_token_id: what pads will hold.
        fields: (B,) or (N, ...), as `field_alignment` says; response fields hold 0 on prompts.
        field_alignment: what the values of each field belong to.
    """

    input_ids: Tensor
    position_ids: Tensor
    block_start: Tensor
    path_start: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    rollout_log_probs: Tensor
    rm_scores: Tensor
    weight_versions: Tensor
    cu_seqlens: Tensor
    prompt_lens: Tensor
    num_turns: Tensor
    scored: Tensor
    rows: tuple[BatchRow, ...]
    pad_token_id: int
    fields: Mapping[str, Tensor] = field(factory=dict)
    field_alignment: Mapping[str, Alignment] = field(factory=dict)

    def __len__(self) -> int:
        """Return B."""
        return len(self.rows)

    @property
    def response_lens(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.cu_seqlens.diff() - self.prompt_lens

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return max(self.cu_seqlens.diff().tolist(), default=0)


def concat_packed(parts: Sequence[PackedBatch]) -> PackedBatch:
    """
    Put the rows of packed batches after one another.

    Raises:
        TrajectoryError: there is none, or they differ in pad id or fields.
    """
    import torch

    if len({(part.pad_token_id, *sorted(part.field_alignment.items())) for part in parts}) != 1:
        raise TrajectoryError("concat takes at least one batch, and all of one pad id and with the same fields")
    _refuse_mixed([row for part in parts for row in part.rows])
    lens = torch.cat([parts[0].cu_seqlens[:1], *(part.cu_seqlens.diff() for part in parts)])
    names = (*TOKEN_DTYPES, *RESPONSE_DTYPES, "prompt_lens", "num_turns", "scored")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return evolve(
        parts[0],
        **joined,
        cu_seqlens=lens.cumsum(0).int(),
        rows=tuple(row for part in parts for row in part.rows),
        fields={name: torch.cat([part.fields[name] for part in parts]) for name in parts[0].fields},
    )


# Episodes to columns


@frozen
class _Source:
    """One row to be: a trajectory, its score and its episode."""

    result: EpisodeResult
    trajectory: Trajectory
    index: int
    score: Score | None
    objective: str = ""


@frozen(kw_only=True, eq=False)
class Rows:
    """
    B rows before they are laid end to end or padded.

    Attributes:
        prompt_lens: B of them.
        response_lens: B of them.
        columns: B arrays by name: of all tokens of a row for `TOKEN_DTYPES`, of its response for `RESPONSE_DTYPES`.
        num_turns: (B,) int64.
        scored: (B,) bool.
        rows: B of them.
    """

    prompt_lens: list[int]
    response_lens: list[int]
    columns: Mapping[str, Sequence[NDArray[Any]]]
    num_turns: NDArray[np.int64]
    scored: NDArray[np.bool_]
    rows: tuple[BatchRow, ...]


def rows_of_episodes(results: Sequence[EpisodeResult]) -> Rows:
    """
    Return the rows of episodes, in their order.

    An episode without a trajectory gives a row without tokens, so that every episode of a group has its row.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    sources = [source for result in results for source in _sources(result)]
    records = [source.trajectory for source in sources]
    masks = [record.response_mask for record in records]
    columns = {
        **{name: [getattr(record, name) for record in records] for name in TOKEN_DTYPES},
        "response_mask": masks,
        "loss_mask": [
            mask if source.result.trainable else np.zeros_like(mask)
            for mask, source in zip(masks, sources, strict=True)
        ],
        "rollout_log_probs": [record.logprobs for record in records],
        "rm_scores": [_scores(source) for source in sources],
        "weight_versions": [record.weight_versions for record in records],
    }
    rows = tuple(map(_row, sources))
    _refuse_mixed(rows)
    return Rows(
        prompt_lens=[record.num_prompt_tokens for record in records],
        response_lens=[record.num_response_tokens for record in records],
        columns=columns,
        num_turns=np.array([len(record.turns()) for record in records], np.int64),
        scored=np.array([source.score is not None for source in sources], bool),
        rows=rows,
    )


def pack(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Lay the trajectories of episodes end to end, in the order of the episodes.

    Args:
        results: finished episodes; see `rows_of_episodes`.
        pad_token_id: for when the batch is padded.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    import torch

    rows = rows_of_episodes(results)
    prompt_lens = np.array(rows.prompt_lens, np.int64)
    arrays: dict[str, NDArray[Any]] = {
        **{name: _joined(rows.columns[name], dtype) for name, dtype in TOKEN_DTYPES.items()},
        **{name: _behind_prompts(rows, name, dtype) for name, dtype in RESPONSE_DTYPES.items()},
        "cu_seqlens": np.concatenate([[0], np.cumsum(prompt_lens + rows.response_lens)]).astype(np.int32),
        "prompt_lens": prompt_lens,
        "num_turns": rows.num_turns,
        "scored": rows.scored,
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return PackedBatch(**tensors, rows=rows.rows, pad_token_id=pad_token_id)


def padded_columns(rows: Rows, padding: Padding, pad_token_id: int) -> dict[str, Tensor]:
    """Return the columns of rows as `turnwise.batch.RolloutBatch` has them, its layout counted within the row."""
    import torch

    fills = {**FILLS, "input_ids": pad_token_id}
    alignment: dict[str, Alignment] = {
        **dict.fromkeys(TOKEN_DTYPES, "token"),
        **dict.fromkeys(RESPONSE_DTYPES, "response"),
    }
    padded = {
        name: padding.pad_rows(rows.columns[name], alignment[name], dtype, fills.get(name, 0))
        for name, dtype in {**TOKEN_DTYPES, **RESPONSE_DTYPES}.items()
    }
    return {**padded, "num_turns": torch.from_numpy(rows.num_turns), "scored": torch.from_numpy(rows.scored)}


def _behind_prompts(rows: Rows, name: str, dtype: DTypeLike) -> NDArray[Any]:
    """Return a column of responses, (N,): prompts hold the column's fill."""
    prompt = np.full(max(rows.prompt_lens, default=0), FILLS.get(name, 0), dtype)
    pairs = zip(rows.prompt_lens, rows.columns[name], strict=True)
    return _joined([piece for size, own in pairs for piece in (prompt[:size], own)], dtype)


def _sources(result: EpisodeResult) -> Iterator[_Source]:
    trajectories, scores = result.trajectories, result.scores
    if scores and len(scores) != len(trajectories):
        raise TrajectoryError(f"episode {result.uid}: {len(scores)} scores for {len(trajectories)} trajectories")
    if not trajectories:
        yield _Source(result, _EMPTY, NO_TRAJECTORY, None)
    index = 0
    for trajectory, score in zip(trajectories, scores or (None,) * len(trajectories), strict=True):
        objective = str(result.objective) if trajectory.has_blocks else ""
        for row, its_score in _rows_to_train(result, trajectory, score):
            yield _Source(result, row, index, its_score, objective)
            index += 1


def _rows_to_train(
    result: EpisodeResult, trajectory: Trajectory, score: Score | None
) -> Iterator[tuple[Trajectory, Score | None]]:
    if result.objective is Objective.EXACT:
        yield trajectory, score
        return
    try:
        yield from expanded(trajectory, score)
    except TrajectoryError as error:
        raise TrajectoryError(f"episode {result.uid}: {error}") from error


def _refuse_mixed(rows: Sequence[BatchRow]) -> None:
    if len({row.objective for row in rows} - {""}) > 1:
        raise TrajectoryError(
            "a batch holds rows sampled under a layout and rows expanded for an engine without: train them apart"
        )


def _row(source: _Source) -> BatchRow:
    result = source.result
    return BatchRow(
        uid=result.task.uid,
        sample_index=result.task.sample_index,
        rollout_n=result.rollout_n,
        global_step=result.global_step,
        validation=result.validation,
        status=result.status,
        agent_name=result.agent_name,
        data_source=result.task.data_source,
        trajectory_index=source.index,
        objective=source.objective,
    )


def _scores(source: _Source) -> FloatArray:
    if source.score is None:
        return np.zeros(source.trajectory.num_response_tokens, np.float32)
    try:
        return token_scores(source.score, source.trajectory)
    except TrajectoryError as error:
        raise TrajectoryError(f"episode {source.result.uid}: {error}") from error


def _joined(columns: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    # The empty array gives a batch of no rows its type.
    return np.concatenate([np.empty(0, dtype), *columns], dtype=dtype, casting="unsafe")


_EMPTY: Final = Trajectory([])
