"""Rows for engines that see plain text: trained tokens, their contexts, and no mixed modes."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings

from turnwise.batch.expansion import expand
from turnwise.batch.rollout_batch import collate
from turnwise.episode.setup import check_objective
from turnwise.errors import ConfigError, TrajectoryError
from turnwise.layout import Objective
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import Capabilities, Status, Task, TokenScore, TrajectoryScore
from turnwise_testing.inputs.strategies import trajectories


def record(*paths, tail=(8,)):
    """Return a record: prompt 1, action 2, a block of (forced 3, actions) each, forced 4, actions."""
    trajectory = Trajectory([1])
    trajectory.add_action([2], [-0.2], 5)
    opened = trajectory.fork(len(paths))
    for path, ids in zip(opened, paths, strict=True):
        path.add_forced([3])
        path.add_action(ids, [-i / 10 for i in ids], 5)
    trajectory.join(opened)
    trajectory.add_forced([4])
    trajectory.add_action(tail, [-i / 10 for i in tail], 6)
    return trajectory


def result(trajectory, objective, score=None):
    """Return a finished episode of one record."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="a")
    scores = () if score is None else (score,)
    return EpisodeResult(
        task=task, status=Status.COMPLETED, trajectories=(trajectory,), scores=scores, objective=objective
    )


def shown(row):
    """Return ids and mask of a row."""
    return row.input_ids.tolist(), row.response_mask.tolist()


def test_three_paths_make_three_rows():
    """The first path stays in the plain row, where the others are context; each other path has a separate row."""
    rows = [row for row, _ in expand(record([5], [6, 6], [7]), None)]

    assert [
        ([1, 2, 3, 5, 3, 6, 6, 3, 7, 4, 8], [1, 0, 1, 0, 0, 0, 0, 0, 0, 1]),
        ([1, 2, 3, 6, 6], [0, 0, 1, 1]),
        ([1, 2, 3, 7], [0, 0, 1]),
    ] == [shown(row) for row in rows]
    assert [np.arange(len(row)).tolist() for row in rows] == [row.position_ids.tolist() for row in rows]
    assert [-0.6, -0.6] == pytest.approx(rows[1].logprobs[rows[1].response_mask == 1].tolist())
    assert [5, 5] == rows[1].weight_versions[rows[1].response_mask == 1].tolist()


def test_a_path_of_the_second_block_sees_the_first_in_a_line():
    """The context that a plain-text engine got for it."""
    trajectory = record([5], [6])
    paths = trajectory.fork(2)
    for path, ids in zip(paths, ([9], [10]), strict=True):
        path.add_action(ids, [-0.5])
    trajectory.join(paths)

    rows = [shown(row) for row, _ in expand(trajectory, None)]
    assert ([1, 2, 3, 5, 3, 6, 4, 8, 10], [0, 0, 0, 0, 0, 0, 0, 1]) == rows[-1]


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_every_action_is_trained_once(trajectory):
    """Over all rows each sampled token is an action exactly once, with its log-probability, and positions are plain."""
    rows = [row for row, _ in expand(trajectory, None)]

    trained = [
        pair
        for row in rows
        for pair in zip(row.response_ids[row.response_mask == 1], row.logprobs[row.response_mask == 1], strict=True)
    ]
    where = trajectory.response_mask == 1
    sampled = list(zip(trajectory.response_ids[where], trajectory.logprobs[where], strict=True))
    assert sorted(map(str, sampled)) == sorted(map(str, trained))
    assert not any(row.has_blocks for row in rows)


def test_a_record_without_blocks_is_its_own_row():
    """Nothing is copied."""
    trajectory = Trajectory([1])

    assert [(trajectory, None)] == list(expand(trajectory, None))


def test_the_episodes_score_stands_in_every_row():
    """Each row is trained by the episode's score; the episode itself earned it once."""
    episode = result(record([5], [6]), Objective.EXPANDED, TrajectoryScore(value=0.5))
    batch = collate([episode], pad_token_id=0)

    assert [0.5, 0.5] == batch.rm_scores.sum(1).tolist()
    assert [0, 1] == batch.column("trajectory_index")
    assert ["expanded"] * 2 == batch.column("objective")
    assert 0.5 == episode.reward


def test_token_scores_go_where_their_tokens_are_trained():
    """No score is lost, none is given twice."""
    trajectory = record([5], [6])
    values = tuple((trajectory.response_mask * np.arange(1, 8)).astype(float).tolist())
    batch = collate([result(trajectory, Objective.EXPANDED, TokenScore(values=values))], pad_token_id=0)

    assert sum(values) == batch.rm_scores.sum()
    assert [0.0, 0.0, 5.0] == batch.rm_scores[1, :3].tolist()


def test_exact_records_stay_one_row():
    """They are trained under their layout."""
    batch = collate([result(record([5], [6]), Objective.EXACT)], pad_token_id=0)

    assert ["exact"] == batch.column("objective")
    assert [0, 1, 2, 3, 2, 3, 4, 5] == batch.position_ids[0].tolist()


def test_an_episode_keeps_the_objective_that_it_forked_under():
    """Switching after a fork would mix both in one record; before it, the engine's capabilities decide."""
    with pytest.raises(TrajectoryError, match="has already forked"):
        check_objective(Objective.EXPANDED, Capabilities(layouts=True), [record([5], [6])])
    with pytest.raises(ConfigError, match="needs an engine that takes layouts"):
        check_objective(Objective.EXACT, Capabilities(), [])
    check_objective(Objective.EXPANDED, Capabilities(layouts=True), [Trajectory([1])])


def test_modes_are_not_mixed():
    """One batch has one objective; episodes without blocks fit both."""
    exact, plain = result(record([5], [6]), Objective.EXACT), result(Trajectory([1]), Objective.EXPANDED)
    other = evolve(exact, objective=Objective.EXPANDED)

    with pytest.raises(TrajectoryError, match="train them apart"):
        collate([exact, other], pad_token_id=0)
    assert ["exact", ""] == collate([exact, plain], pad_token_id=0).column("objective")
