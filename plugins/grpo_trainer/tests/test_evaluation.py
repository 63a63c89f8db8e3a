"""pass@k, its interval, and the report."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, TrajectoryScore
from turnwise.errors import DataError
from turnwise_grpo_trainer.evaluation import evaluated
from turnwise_grpo_trainer.pass_at_k import bootstrap, pass_at_k


@given(right=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_mean_over_all_draws(right, data):
    """Of k samples without replacement, how often is one right."""
    k = data.draw(st.integers(1, len(right)))
    draws = list(itertools.combinations(right, k))

    assert sum(map(any, draws)) / len(draws) == pytest.approx(pass_at_k(len(right), sum(right), k))


def test_k_out_of_range():
    """There is no pass@k of fewer than k samples."""
    with pytest.raises(ValueError, match="k must be within"):
        pass_at_k(3, 1, 4)


def test_bootstrap():
    """The interval holds the mean, is 0 wide for equal values, narrows with more tasks, and is the same every time."""
    few, many = bootstrap([0.0, 1.0] * 8), bootstrap([0.0, 1.0] * 128)

    assert 0.5 == few.value == many.value
    assert few.low < many.low < 0.5 < many.high < few.high
    assert 0.5 - 1.96 * 0.5 / 256**0.5 == pytest.approx(many.low, abs=0.01)
    assert bootstrap([1.0] * 5) == bootstrap([1.0] * 5)
    assert 1.0 == bootstrap([1.0] * 5).low


def results(uid, rewards, *, source="x", status=Status.COMPLETED):
    """Return episodes of one task."""
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid, data_source=source)
    return [
        EpisodeResult(task=task, rollout_n=number, status=status, scores=(TrajectoryScore(value=reward),))
        for number, reward in enumerate(rewards)
    ]


def test_report():
    """By data source and for all; failed episodes are counted and left out."""
    episodes = [
        *results("a", [1.0, 0.0]),
        *results("b", [1.0, 1.0], source="y"),
        *results("c", [0.0, 0.0], status=Status.FAILED),
    ]

    report = evaluated(episodes, ks=[1, 2], threshold=1.0)

    assert (6, 2, 2) == (report["episodes"], report["failed"], report["tasks"])
    assert 0.75 == report["results"]["all"]["mean@2"]["value"]
    assert 1.0 == report["results"]["all"]["pass@2"]["value"]
    assert 0.5 == report["results"]["x"]["pass@1"]["value"]
    assert {"all", "x", "y"} == set(report["results"])


def test_too_large_a_k():
    """One line says what to raise."""
    with pytest.raises(DataError, match="validation_n"):
        evaluated(results("a", [1.0]), ks=[2], threshold=1.0)
