"""
Episodes to rows: arrays for each row of a batch, before they are padded or packed.

No Python loop runs over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from turnwise.batch.columns import NO_TRAJECTORY, BatchRow, check_one_objective
from turnwise.batch.expansion import expand
from turnwise.batch.rewards import ScoredRow, spread_reward
from turnwise.errors import TrajectoryError
from turnwise.layout import Objective
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import FloatArray, Score, TrajectoryScore


@frozen(kw_only=True, eq=False)
class Rows:
    """
    B rows before they are padded or packed.

    Each sequence has B entries. The arrays of a column belong to all tokens of a row or to its response, as the table
    of columns says.
    """

    prompt_lens: list[int]
    response_lens: list[int]
    columns: Mapping[str, Sequence[np.ndarray]]
    num_turns: NDArray[np.int64]
    scored: NDArray[np.bool_]
    episode_rewards: FloatArray
    rows: tuple[BatchRow, ...]


@frozen
class _Source:
    """The trajectory, score and episode of one row, and the record of the episode that it was made from."""

    result: EpisodeResult
    trajectory: Trajectory
    index: int
    score: Score | None
    record: int = -1
    objective: str = ""


def build_rows(results: Sequence[EpisodeResult]) -> Rows:
    """
    Return the rows of episodes, in their order.

    An episode without a trajectory that is trained gives a row without tokens, so that every episode of a group has
    its row. Trajectories that are not trained give none.

    Raises:
        TrajectoryError: an episode's scores do not fit its trajectories; the text names it.
    """
    by_episode = [list(_sources(result)) for result in results]
    sources = [source for own in by_episode for source in own]
    records = [source.trajectory for source in sources]
    masks = [record.response_mask for record in records]
    rows = tuple(map(_row, sources))
    check_one_objective(rows)
    return Rows(
        prompt_lens=[record.num_prompt_tokens for record in records],
        response_lens=[record.num_response_tokens for record in records],
        columns={
            **{
                name: [getattr(record, name) for record in records]
                for name in ("input_ids", "position_ids", "block_start", "path_start", "weight_versions")
            },
            "response_mask": masks,
            "loss_mask": [
                mask if source.result.trainable else np.zeros_like(mask)
                for mask, source in zip(masks, sources, strict=True)
            ],
            "rollout_log_probs": [record.logprobs for record in records],
            "rm_scores": [values for own in by_episode for values in _scores(own)],
        },
        num_turns=np.array([len(record.turns()) for record in records], np.int64),
        scored=np.array([source.score is not None for source in sources], bool),
        episode_rewards=np.array([source.result.reward or 0.0 for source in sources], np.float32),
        rows=rows,
    )


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
    )


def _scores(sources: Sequence[_Source]) -> list[FloatArray]:
    """Return the scores of the response tokens of the rows of one episode."""
    rows = [ScoredRow(source.trajectory, source.score, source.record) for source in sources]
    expanded = any(source.objective == Objective.EXPANDED for source in sources)
    return spread_reward(sources[0].result, rows, expanded=expanded)


_EMPTY: Final = Trajectory([])
