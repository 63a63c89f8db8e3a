"""
Places the reward of an episode on the tokens of its rows.

The episode owns the reward: it is the sum of the scores of all its records, whether they are trained or not. A *line*
is the rows of an episode that follow each other in time. All rows of an episode are one line, unless some of them were
expanded from parallel paths: then each row is a line. Every line with a sampled token has the whole reward, with one
exception. In an episode with expanded rows, scores of turns and tokens lie on the row that trains their tokens, so the
lines share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from turnwise.errors import TrajectoryError
from turnwise.record.result import EpisodeResult, token_scores, total_score
from turnwise.record.trajectory import Trajectory
from turnwise.types import FloatArray, Score, TrajectoryScore


@frozen
class ScoredRow:
    """
    A row of an episode.

    Attributes:
        record: its tokens.
        score: of these tokens; None in an episode without scores.
        source: index of the episode's record that it was made from; -1 for none.
    """

    record: Trajectory
    score: Score | None
    source: int


def spread_reward(result: EpisodeResult, rows: Sequence[ScoredRow], *, expanded: bool) -> list[FloatArray]:
    """
    Return (R,) float32 scores of the response tokens of each row of an episode.

    A score that has no sampled token, because its record is not trained or sampled none, lies on the last
    sampled token of the line; or on its last token if the line has no sampled one.

    Args:
        result: the episode.
        rows: all its rows, in order.
        expanded: whether some of them were expanded from parallel paths, so that each row is a line.

    Raises:
        TrajectoryError: a score does not fit its row.
    """
    try:
        values = [_own_scores(row) for row in rows]
    except TrajectoryError as error:
        raise TrajectoryError(f"episode {result.uid}: {error}") from error
    if not result.scores:
        return values
    lines = [[number] for number in range(len(rows))] if expanded else [list(range(len(rows)))]
    for line in lines:
        _place_rest(result, [rows[number] for number in line], [values[number] for number in line])
    return values


def _own_scores(row: ScoredRow) -> FloatArray:
    if row.score is None:
        return np.zeros(row.record.num_response_tokens, np.float32)
    return token_scores(row.score, row.record)


def _place_rest(result: EpisodeResult, rows: Sequence[ScoredRow], values: Sequence[FloatArray]) -> None:
    """Add the scores without a sampled token to the values of a line."""
    sampled_rows = [number for number, row in enumerate(rows) if row.record.response_mask.any()]
    scored = sampled_rows or [number for number, row in enumerate(rows) if row.record.num_response_tokens]
    if not scored:
        return
    placed = {rows[number].source for number in scored}
    rest = sum(_rest(result, number) for number in range(len(result.scores)) if number not in placed)
    for number in set(range(len(rows))) - set(scored):
        values[number][:] = 0.0
    if rest:
        last = scored[-1]
        values[last][_last_token(rows[last].record)] += rest


def _rest(result: EpisodeResult, number: int) -> float:
    """Return the part of a record's score that every line has; scores of trained tokens stay on their rows."""
    score = result.scores[number]
    record = result.trajectories[number]
    on_own_rows = result.trained[number] and record.response_mask.any() and not isinstance(score, TrajectoryScore)
    return 0.0 if on_own_rows else total_score(score)


def _last_token(record: Trajectory) -> int:
    sampled = np.flatnonzero(record.response_mask)
    return int(sampled[-1]) if len(sampled) else record.num_response_tokens - 1
