"""
Episodes to rows: arrays for each row of a batch, before they are padded or packed.

No Python loop runs over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.batch.columns import NO_TRAJECTORY, Alignment, BatchRow, check_one_objective
from turnwise.batch.expansion import expand
from turnwise.batch.rewards import ScoredRow, spread_reward
from turnwise.errors import TrajectoryError
from turnwise.layout import Objective
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import FloatArray, Score, TrajectoryScore


@frozen(kw_only=True, eq=False)
class Rows:
    """
    B rows before they are padded or packed.

    Each sequence has B entries. The arrays of a column belong to all tokens of a row or to its response, as the table
    of columns says. Rows without any block have no layout: no `position_ids`, `block_start` and `path_start`.
    """

    prompt_lens: list[int]
    response_lens: list[int]
    columns: Mapping[str, Sequence[np.ndarray]]
    num_turns: NDArray[np.int64]
    scored: NDArray[np.bool_]
    episode_rewards: FloatArray
    rows: tuple[BatchRow, ...]
    open_columns: Mapping[str, OpenColumn] = field(factory=dict)


@frozen
class OpenColumn:
    """An open column, and B arrays with its values: of all tokens of a row, or of its response."""

    spec: ColumnSpec
    values: Sequence[np.ndarray]

    @property
    def alignment(self) -> Alignment:
        return "response" if self.spec.of_responses else "token"


@frozen
class _Source:
    """The trajectory, score and episode of one row, and the record of the episode that it was made from."""

    result: EpisodeResult
    trajectory: Trajectory
    index: int
    score: Score | None
    record: int = -1
    objective: str = ""


@frozen(kw_only=True, eq=False)
class EpisodeRows:
    """The rows of one episode, which `join_episodes` joins with others, and the episode's reward or 0."""

    sources: Sequence[_Source]
    columns: Mapping[str, Sequence[np.ndarray]]
    rows: Sequence[BatchRow]
    reward: float


def build_rows(results: Sequence[EpisodeResult]) -> Rows:
    """
    Return the rows of episodes, in their order.

    An episode without a trajectory that is trained gives a row without tokens, so that every episode of a group has
    its row. Trajectories that are not trained give none.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    return join_episodes(list(map(build_episode, results)))


def collect_rows(episodes: Iterable[tuple[int, EpisodeResult]]) -> Rows:
    """
    Return the rows of numbered episodes in the order of the numbers; an episode's rows are built as it arrives.

    Errors as in `build_rows`, after the last episode, because the caller of a run that is left early has to end it.
    """
    found: list[tuple[int, EpisodeRows]] = []
    errors: list[TrajectoryError] = []
    for number, result in episodes:
        try:
            found.append((number, build_episode(result)))
        except TrajectoryError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return join_episodes([rows for _number, rows in sorted(found, key=itemgetter(0))])


def build_episode(result: EpisodeResult) -> EpisodeRows:
    """Return the rows of one episode; errors as in `build_rows`."""
    sources = list(_sources(result))
    records = [source.trajectory for source in sources]
    masks = [record.response_mask for record in records]
    return EpisodeRows(
        sources=sources,
        columns={
            "input_ids": [record.input_ids for record in records],
            "response_mask": masks,
            "loss_mask": masks if result.trainable else list(map(np.zeros_like, masks)),
            "rollout_log_probs": [record.logprobs for record in records],
            "rm_scores": _scores(sources),
            "weight_versions": [record.weight_versions for record in records],
        },
        rows=list(map(_row, sources)),
        reward=result.reward or 0.0,
    )


def join_episodes(episodes: Sequence[EpisodeRows]) -> Rows:
    """Return the rows of all episodes; `TrajectoryError` when they were sampled in ways that do not mix."""
    sources = [source for each in episodes for source in each.sources]
    records = [source.trajectory for source in sources]
    rows = tuple(row for each in episodes for row in each.rows)
    check_one_objective(rows)
    columns: dict[str, Sequence[np.ndarray]] = {
        name: [values for each in episodes for values in each.columns[name]] for name in _PLAIN_COLUMNS
    }
    if any(record.has_blocks for record in records):
        columns |= {name: [getattr(record, name) for record in records] for name in _LAYOUT}
    return Rows(
        prompt_lens=[record.num_prompt_tokens for record in records],
        response_lens=[record.num_response_tokens for record in records],
        columns=columns,
        num_turns=np.array([len(record.turns()) for record in records], np.int64),
        scored=np.array([source.score is not None for source in sources], bool),
        episode_rewards=np.array([each.reward for each in episodes for _row in each.rows], np.float32),
        rows=rows,
        open_columns=_join_open(records),
    )


def _join_open(records: Sequence[Trajectory]) -> dict[str, OpenColumn]:
    """Return the open columns that any record has; the tokens of the other records have no values in them."""
    specs: dict[str, ColumnSpec] = {}
    for record in records:
        for name, spec in record.columns.items():
            if specs.setdefault(name, spec) != spec:
                raise TrajectoryError(f"a batch holds two declarations of column {name!r}: {specs[name]} and {spec}")
    return {
        name: OpenColumn(
            spec,
            [
                record.column(name)
                if name in record.columns
                else spec.filled(record.num_response_tokens if spec.of_responses else len(record))
                for record in records
            ],
        )
        for name, spec in specs.items()
    }


def _sources(result: EpisodeResult) -> Iterator[_Source]:
    trajectories, scores = result.trajectories, result.scores
    if scores and len(scores) != len(trajectories):
        raise TrajectoryError(f"episode {result.uid}: {len(scores)} scores for {len(trajectories)} trajectories")
    if not any(result.trained):
        yield _Source(result, _EMPTY, NO_TRAJECTORY, TrajectoryScore(value=0.0) if scores else None)
    index = 0
    scored = zip(range(len(trajectories)), trajectories, scores or (None,) * len(trajectories), strict=True)
    for record, trajectory, score in compress(scored, result.trained):
        objective = str(result.objective) if trajectory.has_blocks else ""
        for row, its_score in _rows_to_train(result, trajectory, score):
            yield _Source(result, row, index, its_score, record, objective)
            index += 1


def _rows_to_train(
    result: EpisodeResult, trajectory: Trajectory, score: Score | None
) -> Iterator[tuple[Trajectory, Score | None]]:
    if result.objective is Objective.EXACT:
        yield trajectory, score
        return
    try:
        yield from expand(trajectory, score)
    except TrajectoryError as error:
        raise TrajectoryError(f"episode {result.uid}: {error}") from error


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
        metrics={name: float(value) for name, value in result.metrics.extra.items()},
        pictures=source.trajectory.pictures,
    )


def _scores(sources: Sequence[_Source]) -> list[FloatArray]:
    """Return the scores of the response tokens of the rows of one episode."""
    rows = [ScoredRow(source.trajectory, source.score, source.record) for source in sources]
    expanded = any(source.objective == Objective.EXPANDED for source in sources)
    return spread_reward(sources[0].result, rows, expanded=expanded)


_EMPTY: Final = Trajectory([])
_LAYOUT: Final = ("position_ids", "block_start", "path_start")
_PLAIN_COLUMNS: Final = (
    *("input_ids", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "weight_versions"),
)
