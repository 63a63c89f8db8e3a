"""Of every test of the repository, and what the suites of several engines ask of each."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

EXAMPLES = Path(__file__).parent / "examples"

# How long an example takes says something about the machine, not about the code.
settings.register_profile("turnwise", deadline=None)
settings.load_profile("turnwise")


def mean_rewards(config: str, out: Path, *changes: str) -> dict[str, float]:
    """Run an example with 8 episodes for each of its 32 tasks, and return the (32,) mean rewards by task."""
    from turnwise.cli import main
    from turnwise.invariants import check_trajectory
    from turnwise.storage import read_results
    from turnwise.types import Status

    assert main(["rollout", str(EXAMPLES / config), "rollout.n=8", *changes, "--out", str(out)]) == 0
    results = read_results(out / "trajectories.parquet")
    by_task: dict[str, list[float]] = {}
    assert len(results) == 256
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}
    for each in results:
        check_trajectory(each.trajectories[0])
        by_task.setdefault(each.task.uid, []).append(each.reward)
    return {uid: float(np.mean(values)) for uid, values in by_task.items()}


@pytest.fixture
def expect_rewards_of_the_embedded_engine(tmp_path: Path) -> Callable[[str], None]:
    """A function that runs an example, with replicas of this environment, and compares it with the embedded engine."""

    def expect(config: str) -> None:
        served = mean_rewards(config, tmp_path / "served", f"runtime.ray.replica_python={sys.executable}")
        embedded = mean_rewards("calculator.yaml", tmp_path / "embedded")
        differences = np.array([served[uid] - embedded[uid] for uid in embedded])
        error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
        mean = float(differences.mean())
        assert abs(mean) < 3 * error, f"the mean reward differs by {mean:.4f}, with a standard error of {error:.4f}"

    return expect
