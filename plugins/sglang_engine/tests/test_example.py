"""The example: the demo task through SGLang under Ray, with rewards like those of the embedded engine."""

import sys
from pathlib import Path

import numpy as np
import pytest

from turnwise.cli import main
from turnwise.invariants import check_trajectory
from turnwise.storage import read_results
from turnwise.types import Status

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def rollout(out, config, *changes):
    """Run an example with 8 episodes for each of 32 tasks and return them."""
    assert main(["rollout", str(ROOT / "examples" / config), "rollout.n=8", *changes, "--out", str(out)]) == 0
    return read_results(out / "trajectories.parquet")


def rewards(results):
    """Return (32,) means of each task's episodes."""
    by_task = {}
    for each in results:
        by_task.setdefault(each.task.uid, []).append(each.reward)
    return {uid: float(np.mean(values)) for uid, values in by_task.items()}


def test_rewards_are_those_of_the_embedded_engine(tmp_path):
    """256 episodes each, on the same tasks: the means differ by less than three standard errors of the difference."""
    served = rollout(tmp_path / "sglang", "calculator_sglang.yaml", f"runtime.ray.replica_python={sys.executable}")
    embedded = rollout(tmp_path / "embedded", "calculator.yaml")

    assert [256, 256] == [len(served), len(embedded)]
    assert {Status.COMPLETED, Status.TRUNCATED} >= {each.status for each in served}
    for each in served:
        check_trajectory(each.trajectories[0])
    ours, theirs = rewards(served), rewards(embedded)
    differences = np.array([ours[uid] - theirs[uid] for uid in theirs])
    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    print(
        f"mean reward {np.mean(list(ours.values())):.4f} through SGLang, {np.mean(list(theirs.values())):.4f} embedded"
    )
    print(f"difference {differences.mean():.4f} with a standard error of {error:.4f}")
    assert abs(differences.mean()) < 3 * error
