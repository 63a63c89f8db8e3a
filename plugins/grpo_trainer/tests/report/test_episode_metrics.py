"""Metrics of a batch of episodes."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.errors import EngineError
from turnwise.record.lineage import RecordLineage
from turnwise.types import EpisodeMetrics, Fault
from turnwise_grpo_trainer.report.episode_metrics import check_not_all_failed, compute_episode_metrics

STATUSES = ("completed", "truncated", "timed_out", "aborted", "failed")


def make_episode(*, reward=None, status=Status.COMPLETED, lengths=(), fault=None, **metrics):
    """Return an episode with one trajectory of each length of response."""
    records = []
    for length in lengths:
        record = Trajectory([1])
        record.add_action([2] * length, [-0.5] * length)
        records.append(record)
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=status,
        fault=fault,
        trajectories=tuple(records),
        scores=() if reward is None else (TrajectoryScore(value=reward),),
        metrics=EpisodeMetrics(**metrics),
    )


EPISODES = st.lists(
    st.builds(
        make_episode,
        reward=st.one_of(st.none(), st.floats(-10, 10)),
        status=st.sampled_from([Status(name) for name in STATUSES]),
        num_tool_calls=st.integers(0, 3),
        num_turns=st.integers(0, 5),
    ),
    max_size=12,
)


@given(episodes=EPISODES)
def test_shares_and_means_stay_in_their_range(episodes):
    """Shares of statuses add up to 1, means are between the extremes, and no batch divides by 0."""
    metrics = compute_episode_metrics(episodes)

    assert sum(metrics[f"status/{name}"] for name in STATUSES) == pytest.approx(float(bool(episodes)))
    rewards = [each.reward for each in episodes if each.reward is not None]
    if rewards:
        assert min(rewards) - 1e-9 <= metrics["reward/mean"] <= max(rewards) + 1e-9
        assert 0 <= metrics["reward/std"] <= (max(rewards) - min(rewards)) / 2 + 1e-9
    assert metrics["reward/scored"] == pytest.approx(len(rewards) / max(len(episodes), 1))
    assert 0 <= metrics["tools/share"] <= min(1.0, metrics["tools/per_episode"])
    assert all(isinstance(value, float) or value == int(value) for value in metrics.values())


def test_metrics_by_hand():
    """Rewards count scored episodes only; lengths add up the trajectories of an episode; others count every episode."""
    episodes = [
        make_episode(
            reward=1.0, lengths=(3, 2), num_turns=2, num_tool_calls=3, num_tool_errors=1, num_tokens={"action": 4}
        ),
        make_episode(reward=0.0, lengths=(1,), num_turns=1, status=Status.TRUNCATED, num_tokens={"action": 1}),
        make_episode(num_turns=3, num_tool_calls=1, status=Status.FAILED),
    ]

    episodes[0] = evolve(episodes[0], lineage=(RecordLineage(), RecordLineage(trained=False)))

    metrics = compute_episode_metrics(episodes)

    assert metrics["records/untrained"] == 1.0
    assert (0.5, 0.5, 2 / 3) == (metrics["reward/mean"], metrics["reward/std"], metrics["reward/scored"])
    assert (2.0, 5.0, 5.0) == (metrics["length/mean"], metrics["length/max"], metrics["tokens/action"])
    assert (2.0, 4 / 3, 2 / 3, 1 / 3) == tuple(
        metrics[name] for name in ("turns/mean", "tools/per_episode", "tools/share", "tools/errors")
    )
    assert 1 / 3 == metrics["status/completed"] == metrics["status/truncated"] == metrics["status/failed"]


def test_metrics_of_each_source():
    """With several data sources, each has its share of the episodes and the mean reward of its scored ones."""
    episodes = [
        evolve(episode, task=evolve(episode.task, data_source=source))
        for source, reward in (("math", 1.0), ("math", 0.0), ("code", 1.0), ("math", None), ("", None))
        for episode in [make_episode(reward=reward)]
    ]

    found = {name: each for name, each in compute_episode_metrics(episodes).items() if name.startswith("source/")}

    assert found == pytest.approx(
        {
            "source/math/share": 0.6,
            "source/math/reward": 0.5,
            "source/code/share": 0.2,
            "source/code/reward": 1.0,
            "source/unnamed/share": 0.2,
        }
    )
    assert not any(name.startswith("source/") for name in compute_episode_metrics(episodes[:2]))


def test_all_failed():
    """A batch in which every episode failed is an error with the first cause; one other episode is enough."""
    fault = Fault(owner="tool", kind="ToolError", message="no such file")
    failed = [make_episode(status=Status.FAILED, fault=fault), make_episode(status=Status.FAILED)]

    with pytest.raises(EngineError, match="all 2 episodes failed; first failure: tool: ToolError: no such file"):
        check_not_all_failed(failed)
    with pytest.raises(EngineError, match="first failure: unknown"):
        check_not_all_failed(failed[1:])
    check_not_all_failed([*failed, make_episode()])
    check_not_all_failed([])


@given(tasks=st.lists(st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=4), max_size=5))
def test_the_standard_error_counts_tasks(tasks):
    """It is the error of the mean of the tasks' means; with fewer than two scored tasks there is none."""
    episodes = [
        evolve(episode, task=evolve(episode.task, uid=str(number)))
        for number, rewards in enumerate(tasks)
        for episode in (make_episode(reward=reward) for reward in rewards)
    ]
    scored = [[reward for reward in rewards if reward is not None] for rewards in tasks]
    means = [sum(rewards) / len(rewards) for rewards in scored if rewards]

    found = compute_episode_metrics(episodes)

    if len(means) < 2:
        assert "reward/stderr" not in found
    else:
        centre = sum(means) / len(means)
        variance = sum((mean - centre) ** 2 for mean in means) / (len(means) - 1)
        assert found["reward/stderr"] == pytest.approx((variance / len(means)) ** 0.5, abs=1e-9)
