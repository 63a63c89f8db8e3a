"""The calculator's model as a judge, from a config: in one process and on Ray."""

import sys
from pathlib import Path

import pytest

from turnwise.config_file import load_config
from turnwise.runtime.assembly import manager_of, tasks_of

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLUGIN = '''
import turnwise


class SameAnswer:
    """The share of the judge's ids that the model's first turn begins with too, and how much it says in words."""

    def __init__(self, config, resources):
        self.judge = resources.judge

    async def score(self, episode):
        said = await self.judge.ask(episode.task.messages)
        ids = (await self.judge.generate(episode.trajectory.prompt_ids)).token_ids.tolist()
        same = sum(a == b for a, b in zip(ids, episode.trajectory.response_ids.tolist()))
        return turnwise.TrajectoryScore(value=same / len(ids), extra={"num_characters": float(len(said))})


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("same_answer", SameAnswer)
'''


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with the reward as an installed plugin."""
    info = tmp_path / "acme_same_answer-1.0.dist-info"
    info.mkdir()
    (tmp_path / "acme_same_answer.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-same-answer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise]\nacme_same_answer = acme_same_answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_same_answer", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def scores(*overrides):
    """Run two tasks of the demo and return what was sampled and scored."""
    judge = ["engine=transformers", "model.path=package:turnwise_calculator_demo", "sampling.max_tokens=24"]
    plugins = ["transformers_engine", "tool_agent", "hermes_parser", "calculator_demo", "acme_same_answer"]
    config = load_config(
        ROOT / "examples/calculator.yaml",
        [
            *("data.limit=2", "rollout.n=1", "rollout.sampling.temperature=0.0", "reward=same_answer"),
            *(f"judge.{each}" for each in judge),
            f"plugins=[{', '.join(plugins)}]",
            *overrides,
        ],
    )
    with manager_of(config) as manager:
        results = manager.rollout(tasks_of(config))
    return [(r.status, r.scores, r.fault, r.trajectories[0].input_ids.tolist()) for r in results]


def test_a_judge_scores_here_and_on_ray(site):
    """
    The second model answers in its own words; on Ray it is asked by a reward worker, through replicas of its own.
    """
    import ray

    here = scores()
    ray.init(
        include_dashboard=False,
        num_cpus=4,
        namespace="turnwise",
        runtime_env={"env_vars": {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}},
    )
    try:
        there = scores("runtime=ray", "runtime.reward_workers=1")
    finally:
        ray.shutdown()

    for found in (here, there):
        assert [("completed", None)] * 2 == [(status, fault) for status, _, fault, _ in found]
        # At temperature 0 the judge goes on from the prompt as the same model did.
        assert [1.0] * 2 == [score.value for _, (score,), _, _ in found]
        assert all(score.extra["num_characters"] > 0 for _, (score,), _, _ in found)
