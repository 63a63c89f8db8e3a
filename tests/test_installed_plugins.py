"""
A run in an environment with every plugin: each option works beside agents that cannot be built in this run.

Here `environment` and `external` lack options, and `parallel_thinking` and `torl_python` lack tokens and tools.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise import load_resolved
from turnwise.cli import main
from turnwise.errors import TurnwiseError
from turnwise.runtime.ray.blueprint import ConfigBlueprint
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise_result_files import read_results
from turnwise_testing.engines.scripted import ScriptedEngine

EXAMPLE = Path(__file__).parents[1] / "examples/calculator.yaml"
OWN = """
from turnwise_rollout_buffer import GroupReward, GroupRewardConfig


def score(episode):
    return 0.25


def whole(episodes):
    return [float(len(episodes))] * len(episodes)


class Half(GroupReward):
    def __init__(self):
        super().__init__(GroupRewardConfig())

    async def score_group(self, episodes):
        return [0.5] * len(episodes)
"""
REWARDS = {
    "reward": [],
    "own reward": ["reward=./own.py:score"],
    "group reward": ["group_reward=relative_length"],
    "own group reward": ["reward=null", "group_reward=./own.py:whole"],
    "class of a group reward": ["reward=null", "group_reward=./own.py:Half"],
    "reward and group reward": ["group_reward=./own.py:whole"],
}
"""Overrides of the example that choose the reward of its episodes."""
SCORED = {
    "own reward": {0.25},
    "own group reward": {2.0},
    "class of a group reward": {0.5},
    "reward and group reward": {2.0},
}


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A copy of the example beside a file with rewards."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    text = EXAMPLE.read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "run.yaml"


def on_ray(reward: str, workers: int) -> list[str]:
    changes = ["modules=[./own.py]", f"data.path={EXAMPLE.parent / 'calculator.jsonl'}", "data.limit=2", "rollout.n=2"]
    return [*REWARDS[reward], *changes, "runtime=ray", f"runtime.reward_workers={workers}"]


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_parts_of_a_run_on_ray(own_code: Path, reward: str, workers: int) -> None:
    """A worker and a reward worker build their parts, but no agent that no task names; a plan accepts the same runs."""
    if not workers and "group" in reward:
        with pytest.raises(TurnwiseError, match="must be at least 1 on Ray with a group_reward"):
            load_resolved(own_code, on_ray(reward, workers))
        return
    config, host = load_resolved(own_code, on_ray(reward, workers))
    blueprint = ConfigBlueprint.of(config, host)
    components = blueprint.make_components(ScriptedEngine())
    if workers:
        components = RewardPool().attach(components)

    assert {"environment", "external", "parallel_thinking", "tool_agent"} <= set(components.programs)
    assert components.programs["tool_agent"].agent is not None
    with pytest.raises(TurnwiseError):
        components.programs["environment"]  # it is there, but cannot be built without an option
    assert (config.reward is None) == (blueprint.make_reward() is None)
    assert (config.group_reward is None) == (blueprint.make_group_reward() is None)
    assert main(["plan", str(own_code), *on_ray(reward, workers)]) == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("reward", ["reward", "group reward", "own group reward"])
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_with_reward_workers(own_code: Path, tmp_path: Path, reward: str) -> None:
    """`turnwise rollout` on Ray scores every episode in reward workers, with each kind of reward."""
    out = tmp_path / "out"
    assert main(["rollout", str(own_code), *on_ray(reward, 1), "--out", str(out)]) == 0
    results = list(read_results(out / "trajectories.parquet"))
    assert {"completed", "truncated"} >= {each.status for each in results}
    assert 4 == len(results)
    scores = {score.value for each in results for score in each.scores}
    assert scores == SCORED.get(reward, scores)
    assert all(each.scores for each in results)
