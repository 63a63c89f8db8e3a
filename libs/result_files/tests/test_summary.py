"""Tests of `turnwise_result_files.summary`."""

import json
import math

import numpy as np
import pytest

from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Status, Task, TrajectoryScore
from turnwise_result_files.summary import summarize, write_metrics


def episode(uid: str, reward: float | None, *, status: Status = Status.COMPLETED, **metrics: object) -> EpisodeResult:
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    record.add_forced([6])
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "a"},), uid=uid),
        status=status,
        trajectories=(record,),
        scores=() if reward is None else (TrajectoryScore(value=reward),),
        metrics=EpisodeMetrics(**metrics),
    )


def test_numbers():
    """Counts, spreads and rates over four episodes of two groups and one that failed."""
    results = [
        episode(
            "a", 1.0, total_s=1.0, llm_s=0.5, num_turns=1, num_tool_calls=2, num_tool_errors=1, extra={"hits": 3.0}
        ),
        episode("a", 0.0, total_s=4.0, llm_s=1.5, num_turns=3, num_tool_calls=1, extra={"a": 0.5, "hits": 1.0}),
        episode("b", 0.5, total_s=2.0, llm_s=1.0, num_turns=2, tool_s=3.0),
        episode("c", None, status=Status.FAILED),
    ]
    assert summarize(results, 2.0) == {
        "episodes": 4,
        "wall_s": 2.0,
        "status": {"completed": 3, "truncated": 0, "timed_out": 0, "aborted": 0, "failed": 1},
        "reward": {"scored": 3, "min": 0.0, "mean": 0.5, "max": 1.0},
        "groups": {"count": 3, "n": 2, "mean@n": 0.5, "best@n": 0.75},
        "num_turns": {"min": 0, "mean": 1.5, "max": 3},
        "num_tool_calls": 3,
        "num_tool_errors": 1,
        "num_tokens": {"prompt": 8, "action": 8, "observation": 4, "forced": 4},
        "limits": {},
        "mask_ratio": 0.5,
        "extra": {"a": {"sum": 0.5, "mean": 0.125}, "hits": {"sum": 4.0, "mean": 1.0}},
        "action_tokens_per_s": 4.0,
        "episodes_per_s": 2.0,
        "total_s": {"min": 0.0, "mean": 1.75, "max": 4.0},
        "llm_s": {"min": 0.0, "mean": 0.75, "max": 1.5},
        "tool_s": {"min": 0.0, "mean": 0.75, "max": 3.0},
        "slowest": "a/0",
    }


def test_nothing():
    """No episodes and no time give zeros and None, never an exception."""
    summary = summarize([], 0.0)
    assert summary["episodes"] == 0
    assert summary["reward"] == {"scored": 0, "min": None, "mean": None, "max": None}
    assert summary["groups"] == {"count": 0, "n": 0, "mean@n": None, "best@n": None}
    absent = ("mask_ratio", "action_tokens_per_s", "episodes_per_s", "slowest")
    assert [summary[name] for name in absent] == [None] * 4


@pytest.mark.parametrize(
    "results", [[], [episode("a", math.nan)], [episode("a", None, total_s=1.0), episode("b", math.inf)]]
)
def test_metrics_file_is_json(tmp_path, results):
    """For all numbers the file is valid JSON, and no partial file is left."""
    path = tmp_path / "new" / "metrics.json"
    write_metrics(path, summarize(results, 1.0) | {"more": [np.float32(0.5), math.nan]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse)["more"] == [0.5, None]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.json"]
