"""Rows for TransferQueue have the rewards of their episode."""

from __future__ import annotations

import pytest

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.record.lineage import RecordLineage
from turnwise_verl_bridge.rows import to_queue_rows


@pytest.mark.parametrize(
    ("scores", "untrained", "expected"),
    [
        ((0.5,), (), [[0, 0.5, 0]]),
        ((1.0, 0.5), (), [[0, 0, 0], [0, 0.5, 1.0]]),
        ((0.0, 0.0), (), [[0, 0, 0], [0, 0, 0]]),
        ((1.0, 0.5, 0.25), (1,), [[0, 0, 0], [0, 0.25, 1.5]]),
    ],
)
def test_the_last_row_has_the_reward_of_the_episode(scores, untrained, expected):
    """verl takes the reward of an episode from its last row, so this row has the scores of all trajectories."""
    records = []
    for _ in scores:
        record = Trajectory([1, 2])
        record.add_action([3, 4], [-0.5, -0.5])
        record.add_observation([5])
        records.append(record)
    episode = EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=Status.COMPLETED,
        trajectories=tuple(records),
        scores=tuple(TrajectoryScore(value=score) for score in scores),
        lineage=tuple(RecordLineage(trained=number not in untrained) for number in range(len(scores))),
    )

    rows = to_queue_rows(collate([episode], pad_token_id=0), episode)

    assert expected == [row["rm_scores"].tolist() for row in rows]
    assert sum(scores) == rows[-1]["rm_scores"].sum()
