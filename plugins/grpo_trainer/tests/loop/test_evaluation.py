"""pass@k, bootstrap intervals, and the report of an evaluation."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from turnwise import EpisodeResult, Status, Task, TrajectoryScore
from turnwise.errors import DataError
from turnwise_grpo_trainer.loop.evaluation import evaluate_episodes, exclusion_notes, results_table
from turnwise_grpo_trainer.report.pass_at_k import Estimate, bootstrap, pass_at_k


@given(right=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_mean_over_all_draws(right, data):
    """pass@k is the share of draws of k samples, without replacement, with a correct one."""
    k = data.draw(st.integers(1, len(right)))
    draws = list(itertools.combinations(right, k))

    assert sum(map(any, draws)) / len(draws) == pytest.approx(pass_at_k(len(right), sum(right), k))


def test_k_out_of_range():
    """pass@k of fewer than k samples is an error."""
    with pytest.raises(ValueError, match="k must be between"):
        pass_at_k(3, 1, 4)


def test_bootstrap():
    """The interval contains the mean, narrows with more tasks, and is reproducible."""
    few, many = bootstrap([0.0, 1.0] * 8), bootstrap([0.0, 1.0] * 128)

    assert 0.5 == few.value == many.value
    assert few.low < many.low < 0.5 < many.high < few.high
    assert 0.5 - 1.96 * 0.5 / 256**0.5 == pytest.approx(many.low, abs=0.01)
    assert bootstrap([0.0, 1.0] * 8) == few


@pytest.mark.parametrize(
    ("num_tasks", "share"),
    [(20, 0.5), (64, 0.5), (64, 0.1), (20, 0.05), (64, 0.02), (96, 0.99), (96, 0.005), (20, 0.99)],
)
def test_intervals_contain_the_true_share(num_tasks, share):
    """In 88 of 100 cases at least, also where nearly all tasks are equal; Wilson's has such dips near 1 of 200."""
    rng = np.random.default_rng(0)
    found = [bootstrap((rng.random(num_tasks) < share).astype(float).tolist(), resamples=500) for _ in range(400)]
    assert sum(each.low <= share <= each.high for each in found) / len(found) > 0.88
    assert all(0 <= each.low <= each.value <= each.high <= 1 for each in found)


def test_equal_tasks_have_an_interval():
    """Of 20 solved tasks the interval is Wilson's; equal values that are neither 0 nor 1 tell no width."""
    assert bootstrap([1.0] * 20).low == pytest.approx(0.8389, abs=1e-4)
    assert bootstrap([0.0] * 20).high == pytest.approx(0.1611, abs=1e-4)
    assert Estimate(value=0.5, low=0.5, high=0.5) == bootstrap([0.5] * 20)


def test_bootstrap_of_one():
    """A single task has no interval."""
    assert Estimate(value=0.5, low=None, high=None) == bootstrap([0.5])


def results(uid, rewards, *, source="x", status=Status.COMPLETED):
    """Return episodes of one task; a reward of None is an unscored episode."""
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid, data_source=source)
    return [
        EpisodeResult(
            task=task,
            rollout_n=number,
            status=status,
            scores=() if reward is None else (TrajectoryScore(value=reward),),
        )
        for number, reward in enumerate(rewards)
    ]


def figure(report, name, source="all"):
    """Return the value, the number of tasks and the number of excluded tasks."""
    found = report["results"][source][name]
    return found["value"], found["tasks"], found["left_out"]


def test_report():
    """The report has results by data source and for all; failed episodes are counted and excluded."""
    episodes = [
        *results("a", [1.0, 0.0]),
        *results("b", [1.0, 1.0], source="y"),
        *results("c", [0.0, 0.0], status=Status.FAILED),
    ]

    report = evaluate_episodes(episodes, n=2, ks=[1, 2], threshold=1.0)

    assert (6, 2, 3) == (report["episodes"], report["failed"], report["tasks"])
    assert (0.75, 2, 1) == figure(report, "mean@2")
    assert (1.0, 2, 1) == figure(report, "pass@2")
    assert (0.5, 1, 1) == figure(report, "pass@1", "x")
    assert {"all", "x", "y"} == set(report["results"])


def test_failed_episodes_show():
    """The report and the notes count episodes and tasks without a score."""
    solved = [each for task in range(10) for each in results(f"s{task}", [1.0] * 4)]
    failed = [each for task in range(39) for each in results(f"f{task}", [0.0] * 4, status=Status.FAILED)]

    report = evaluate_episodes([*solved, *failed, *results("u", [None] * 4)], n=4, ks=[4], threshold=1.0)

    assert {"failed": 156, "completed": 4} == report["unscored_episodes"]
    assert (50, 40, 0) == (report["tasks"], report["unscored_tasks"], report["short_tasks"])
    assert [
        "160 of 200 episodes have no score: 156 failed, 4 completed",
        "40 of 50 tasks have no scored sample and are left out",
        "intervals over fewer than 20 tasks are too narrow; a single task has none",
    ] == exclusion_notes(report)
    assert "50 tasks, 4 samples each" == results_table(report).title


def test_failed_data_source():
    """A data source with only failed episodes keeps its row, with empty cells."""
    episodes = [*results("a", [1.0]), *results("b", [1.0], source="y", status=Status.FAILED)]

    report = evaluate_episodes(episodes, n=1, ks=[1], threshold=1.0)

    assert (None, 0, 1) == figure(report, "mean@1", "y")
    assert ["-"] == list(results_table(report).columns[1].cells)[2:]


def test_brackets_are_shown():
    """Intervals and data sources have brackets, which are no markup of the terminal."""
    episodes = [*results("a", [0.0], source="[red]"), *results("b", [1.0], source="[/]")]
    console = Console(width=200, file=io.StringIO())

    console.print(results_table(evaluate_episodes(episodes, n=1, ks=[1], threshold=1.0)))

    printed = console.file.getvalue()
    assert "[red]" in printed
    assert "[/]" in printed
    assert "0.500 [0.095, 0.905]" in printed


def test_one_failed_episode_of_many():
    """Only pass@4 excludes its task, and a note says so; mean@4 uses the remaining samples."""
    episodes = [each for task in range(49) for each in results(str(task), [1.0, 0.0, 0.0, 0.0])]
    episodes += [*results("49", [1.0, 1.0, 0.0]), *results("49", [0.0], status=Status.FAILED)]

    report = evaluate_episodes(episodes, n=4, ks=[1, 4], threshold=1.0)

    assert (pytest.approx((49 / 4 + 2 / 3) / 50), 50, 0) == figure(report, "mean@4")
    assert (pytest.approx((49 / 4 + 2 / 3) / 50), 50, 0) == figure(report, "pass@1")
    assert (1.0, 49, 1) == figure(report, "pass@4")
    assert [
        "1 of 200 episodes have no score: 1 failed",
        "1 of 50 tasks have 1 to 3 scored samples: mean@4 and solved@4 use these",
        "pass@4 leaves out 1 of 50 tasks, which have fewer scored samples",
    ] == exclusion_notes(report)


def test_label_of_the_mean():
    """The label has the requested number of samples; a note counts the tasks with fewer."""
    episodes = [*results("a", [1.0, 1.0, 0.0]), *results("b", [0.0, None, None])]

    report = evaluate_episodes(episodes, n=3, ks=[1], threshold=1.0)

    assert ["mean@3", "solved@3", "pass@1"] == list(report["results"]["all"])
    assert (pytest.approx(1 / 3), 2, 0) == figure(report, "mean@3")
    assert 1 == report["short_tasks"]
    assert "1 of 2 tasks have 1 to 2 scored samples: mean@3 and solved@3 use these" in exclusion_notes(report)


def test_no_task_has_k_samples():
    """pass@k is null if no task has k samples; a single task is shown without an interval."""
    report = evaluate_episodes(results("a", [1.0, None]), n=2, ks=[1, 2], threshold=1.0)

    assert {"value": None, "low": None, "high": None, "tasks": 0, "left_out": 1} == report["results"]["all"]["pass@2"]
    assert ["all", "1.000", "1.000", "1.000", "-"] == [
        cell for column in results_table(report).columns for cell in column.cells
    ]


def test_no_notes():
    """With many tasks and all samples scored, there are no notes."""
    episodes = [each for task in range(20) for each in results(str(task), [1.0, 0.0])]

    report = evaluate_episodes(episodes, n=2, ks=[2], threshold=1.0)

    assert [] == exclusion_notes(report)
    assert "1.000 [0.839, 1.000]" == rendered(report).split("│")[4].strip()


def rendered(report):
    """Return the table as text."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table(report))
    return capture.get()


def test_nothing_scored():
    """An evaluation without any score is an error."""
    with pytest.raises(DataError, match="none of the 2 episodes was scored"):
        evaluate_episodes(results("a", [None, None]), n=2, ks=[1], threshold=1.0)
