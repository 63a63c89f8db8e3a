"""`relative_length` orders right answers by their lengths, in a run with a config."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, RolloutManager, Status, Task, Trajectory, TrajectoryScore, load_config
from turnwise_group_rewards.config import RelativeLengthConfig
from turnwise_group_rewards.relative_length import RelativeLength
from turnwise_task_files import load_tasks


def episode(number, length, reward):
    """Return an ended episode with some sampled tokens."""
    record = Trajectory(np.array([1]))
    record.add_action(np.zeros(length, np.int32), np.zeros(length, np.float32), 0)
    scores = () if reward is None else (TrajectoryScore(value=reward),)
    task = Task(messages=({"role": "user", "content": "?"},), uid="a")
    return EpisodeResult(task=task, rollout_n=number, status=Status.COMPLETED, trajectories=(record,), scores=scores)


@given(
    members=st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8),
    weight=st.floats(0, 1),
)
def test_right_answers_are_ordered_by_length(members, weight):
    """Shorter right answers never score less, wrong ones never gain, and no term exceeds half of the weight."""
    reward = RelativeLength(RelativeLengthConfig(weight=weight))
    scores = reward.score_group([episode(number, *member) for number, member in enumerate(members)])

    for (length, before), score in zip(members, scores, strict=True):
        assert abs(score - before) <= weight / 2 + 1e-9
        assert before or score <= 0
        for (other_length, other), other_score in zip(members, scores, strict=True):
            assert not (before == other == 1.0 and length <= other_length and score < other_score)


def test_a_run_without_a_reward_is_named():
    """Without scores there are no right answers."""
    with pytest.raises(ValueError, match=r"^episode a/0 has no reward; relative_length needs a reward in the config$"):
        RelativeLength(RelativeLengthConfig()).score_group([episode(0, 3, None)])


def test_a_run_from_a_config(tmp_path):
    """The section `group_reward` is enough; the scores of the group are in the batch."""
    rows = [{"prompt": f"What is {number} + 1?", "ground_truth": str(number + 1)} for number in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = load_config(
        {
            "data": {"path": str(tmp_path / "data.jsonl")},
            "model": {"path": "package:turnwise_calculator_demo"},
            "engine": "transformers",
            "agent": "single_turn",
            "reward": "exact_match",
            "group_reward": {"name": "relative_length", "right_above": -1.0, "weight": 0.5},
            "rollout": {"n": 3, "response_length": 24},
        }
    )
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))
        batch = manager.collate(results)

    assert {3.0} == {result.metrics.extra["group_size"] for result in results}
    for start in (0, 3):
        group = results[start : start + 3]
        lengths = [each.trajectories[0].num_response_tokens for each in group]
        terms = [each.reward - each.metrics.extra["episode_reward"] for each in group]
        expected = [0.25 - 0.5 * (each - min(lengths)) / max(1, max(lengths) - min(lengths)) for each in lengths]
        assert terms == pytest.approx(expected if max(lengths) > min(lengths) else [0.0] * 3)
    assert [r.reward for r in results] == pytest.approx(batch.rm_scores.sum(1).tolist())
