"""The calculator's model as a judge, built from a config: in one process and on Ray."""

import sys
from pathlib import Path

import pytest

from turnwise import RolloutManager
from turnwise.config.file import load_config
from turnwise_task_files import load_tasks
from turnwise_testing.whole_runs.installation import install_plugin

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore")

PLUGIN = '''
import turnwise


class SameAnswer:
    """The share of the judge's ids that equal the first turn's ids, and the length of its answer in words."""

    def __init__(self, config, resources):
        self.judge = resources.judge

    async def score(self, episode):
        answer = await self.judge.ask(episode.task.messages)
        ids = (await self.judge.generate(episode.trajectory.prompt_ids)).token_ids.tolist()
        same = sum(a == b for a, b in zip(ids, episode.trajectory.response_ids.tolist()))
        return turnwise.TrajectoryScore(value=same / len(ids), extra={"num_characters": float(len(answer))})


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("same_answer", SameAnswer)
'''


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which the reward is an installed plugin."""
    install_plugin(tmp_path, "acme_same_answer", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_same_answer", raising=False)
    return tmp_path


def scores(*overrides):
    """Run two tasks of the demo and return their statuses, scores, faults and ids."""
    judge = ["engine=transformers", "model.path=package:turnwise_calculator_demo", "sampling.max_tokens=24"]
    plugins = [
        "chat_templates",
        "transformers_engine",
        "tool_agent",
        "hermes_parser",
        "routers",
        "calculator_demo",
        "acme_same_answer",
    ]
    config = load_config(
        ROOT / "examples/calculator.yaml",
        [
            *("data.limit=2", "rollout.n=1", "rollout.sampling.temperature=0.0", "reward=same_answer"),
            *(f"judge.{each}" for each in judge),
            f"plugins=[{', '.join(plugins)}]",
            *overrides,
        ],
    )
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))
    return [(r.status, r.scores, r.fault, r.trajectories[0].input_ids.tolist()) for r in results]


def check_scores(found):
    """Check that two episodes completed, and that the judge gave the model's own answer: both sample greedily."""
    assert [("completed", None)] * 2 == [(status, fault) for status, _, fault, _ in found]
    assert [1.0] * 2 == [score.value for _, (score,), _, _ in found]
    assert all(score.extra["num_characters"] > 0 for _, (score,), _, _ in found)


def test_a_judge_scores_in_one_process(site):
    """A reward asks the second model for words and for ids."""
    check_scores(scores())


@pytest.mark.ray
@pytest.mark.slow
def test_a_judge_scores_on_ray(site, ray_head):
    """On Ray a reward worker asks the judge's own replicas."""
    import ray

    env = {"env_vars": {"PYTHONPATH": str(site)}}
    ray.init(address=ray_head, namespace="turnwise", runtime_env=env)
    try:
        check_scores(scores("runtime=ray", "runtime.reward_workers=1"))
    finally:
        ray.shutdown()
