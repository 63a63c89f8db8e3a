"""
Trajectories end to end: the columns of many episodes without a single pad, and where they go when they are padded.

This is the form that all others are made from. Copies run over whole rows; no Python loop runs over tokens.

Shapes: B rows, one per trajectory; N tokens of all rows; P prompt columns, R response columns, T = P + R.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from attrs import evolve, field, fields, frozen
from numpy.typing import DTypeLike, NDArray

from turnwise.errors import PluginError, TrajectoryError
from turnwise.expansion import expanded
from turnwise.layout import Objective
from turnwise.record import NO_VERSION
from turnwise.result import EpisodeResult, token_scores
from turnwise.trajectory import Trajectory
from turnwise.types import FloatArray, Score, Status

if TYPE_CHECKING:
    from torch import Tensor

Alignment = Literal["row", "response", "token"]
"""What a field has a value for: each row, each response token, or each token."""

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


@frozen(kw_only=True)
class Padding:
    """
    Where the real tokens of each row stand among padded columns: up to column P the prompt, from there the response.

    Attributes:
        prompt_lens: B of them.
        response_lens: B of them.
        prompt_length: P.
        response_length: R.
    """

    prompt_lens: Sequence[int]
    response_lens: Sequence[int]
    prompt_length: int
    response_length: int

    def pad(self, flat: Tensor, alignment: Alignment, fill: int = 0) -> Tensor:
        """Return (N, ...) values as (B, T, ...), or as (B, R, ...) without those of prompts; (B,) stays."""
        if alignment == "row":
            return flat
        origin = self.prompt_length if alignment == "token" else 0
        padded = flat.new_full((len(self.prompt_lens), origin + self.response_length, *flat.shape[1:]), fill)
        stop = 0
        for row, (prompt, response) in enumerate(zip(self.prompt_lens, self.response_lens, strict=True)):
            start, stop = stop, stop + prompt + response
            if alignment == "token":
                padded[row, origin - prompt : origin + response] = flat[start:stop]
            else:
                padded[row, :response] = flat[start + prompt : stop]
        return padded

    def unpad(self, padded: Tensor, alignment: Alignment, fill: int = 0) -> Tensor:
        """Undo `pad`: (B, T, ...) or (B, R, ...) become (N, ...), with `fill` on prompts that had no values."""
        import torch

        if alignment == "row":
            return padded
        pieces = [padded.new_empty((0, *padded.shape[2:]))]
        for row, (prompt, response) in enumerate(zip(self.prompt_lens, self.response_lens, strict=True)):
            if alignment == "token":
                pieces.append(padded[row, self.prompt_length - prompt : self.prompt_length + response])
            else:
                pieces += [padded.new_full((prompt, *padded.shape[2:]), fill), padded[row, :response]]
        return torch.cat(pieces)


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


def alignment_of(name: str, shape: tuple[int, ...], size: int, response_length: int, total_length: int) -> Alignment:
    """
    Return what the values of a field of a padded batch of `size` rows belong to, by its shape.

    Raises:
        PluginError: the shape is none of (B,), (B, R, ...) and (B, T, ...).
    """
    if shape == (size,):
        return "row"
    if shape[:2] == (size, response_length):
        return "response"
    if shape[:2] == (size, total_length):
        return "token"
    wanted = f"({size},), ({size}, {response_length}, ...) or ({size}, {total_length}, ...)"
    raise PluginError(f"field {name!r} has shape {shape}, expected {wanted}")


def padded_length(lengths: Sequence[int], fixed: int | None, multiple_of: int, what: str) -> int:
    """
    Return how many columns hold all rows.

    Args:
        lengths: of each row.
        fixed: that many exactly; None takes the longest row, rounded up.
        multiple_of: what to round up to.
        what: `prompt` or `response`, for the error.

    Raises:
        TrajectoryError: a row is longer than `fixed`; cutting it here would change what was sampled.
    """
    if multiple_of < 1:
        raise TrajectoryError(f"'pad_to_multiple_of' must be at least 1, not {multiple_of}")
    longest = max(lengths, default=0)
    if fixed is None:
        return -(-longest // multiple_of) * multiple_of
    if longest > fixed:
        raise TrajectoryError(f"row {lengths.index(longest)} has {longest} {what} tokens, '{what}_length' is {fixed}")
    return fixed


# Episodes to columns


@frozen
class _Source:
    """One row to be: a trajectory, its score and its episode."""

    result: EpisodeResult
    trajectory: Trajectory
    index: int
    score: Score | None
    objective: str = ""


def pack(results: Sequence[EpisodeResult], *, pad_token_id: int) -> PackedBatch:
    """
    Lay the trajectories of episodes end to end, in the order of the episodes.

    An episode without a trajectory gives a row without tokens, so that every episode of a group has its row.

    Args:
        results: finished episodes.
        pad_token_id: for when the batch is padded.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    import torch

    sources = [source for result in results for source in _sources(result)]
    records = [source.trajectory for source in sources]
    prompt_lens = np.array([t.num_prompt_tokens for t in records], np.int64)
    response_lens = np.array([t.num_response_tokens for t in records], np.int64)
    arrays: dict[str, NDArray[Any]] = {
        name: _joined([getattr(t, name) for t in records], dtype) for name, dtype in TOKEN_DTYPES.items()
    }
    arrays |= _response_columns(sources)
    trainable = np.array([source.result.trainable for source in sources], bool)
    arrays["loss_mask"] = arrays["response_mask"] * np.repeat(trainable, prompt_lens + response_lens)
    arrays["cu_seqlens"] = np.concatenate([[0], np.cumsum(prompt_lens + response_lens)]).astype(np.int32)
    arrays["prompt_lens"] = prompt_lens
    arrays["num_turns"] = np.array([len(t.turns()) for t in records], np.int64)
    arrays["scored"] = np.array([source.score is not None for source in sources], bool)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    rows = tuple(map(_row, sources))
    _refuse_mixed(rows)
    return PackedBatch(**tensors, rows=rows, pad_token_id=pad_token_id)


def _response_columns(sources: Sequence[_Source]) -> dict[str, NDArray[Any]]:
    """Return what the records and scores say of response tokens, each (N,): prompts hold the column's fill."""
    values: dict[str, list[NDArray[Any]]] = {
        "response_mask": [source.trajectory.response_mask for source in sources],
        "rollout_log_probs": [source.trajectory.logprobs for source in sources],
        "rm_scores": [_scores(source) for source in sources],
        "weight_versions": [source.trajectory.weight_versions for source in sources],
    }
    lens = [source.trajectory.num_prompt_tokens for source in sources]
    columns = {}
    for name, responses in values.items():
        prompt = np.full(max(lens, default=0), FILLS.get(name, 0), RESPONSE_DTYPES[name])
        pieces = [piece for size, own in zip(lens, responses, strict=True) for piece in (prompt[:size], own)]
        columns[name] = _joined(pieces, RESPONSE_DTYPES[name])
    return columns


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
