"""A reward that shows a judge the pictures of an episode, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from picture_rollouts import CAT, DOG, PLUGINS, roll_out, write_run

from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import SITE

REWARD = """
import turnwise


class Judged:
    def __init__(self, config, resources):
        self.judge = resources.judge

    async def score(self, episode):
        shown = [m["content"] for m in episode.messages if isinstance(m["content"], list)]
        question = [part for content in shown for part in content] + [{"type": "text", "text": "Is it a cat?"}]
        return float("cat" in await self.judge.ask([{"role": "user", "content": question}]))


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("judged", Judged)
"""

pytestmark = pytest.mark.usefixtures("starts_a_process")


def make_judged(folder: Path, *, takes_pictures: bool = True) -> Path:
    """Write a run whose judge sees the pictures of the task and of the camera, and says that it is a cat."""
    install_plugin(folder / SITE, "acme_judged", REWARD)
    engine = {"name": "seeing", "log": str(folder / "judged.jsonl"), "num_calls": 0, "pictures": takes_pictures}
    judge = {"engine": engine, "model": {"path": "model"}}
    return write_run(folder, reward="judged", judge=judge, plugins=[*PLUGINS, "acme_judged"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(
            ("runtime=ray", "runtime.num_workers=1", "runtime.num_replicas=1", "runtime.reward_workers=1"),
            marks=pytest.mark.ray,
        ),
    ],
    ids=["local", "ray"],
)
def test_the_judge_sees_the_pictures(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Both, in their order, in each of its requests."""
    done = roll_out(tmp_path, make_judged(tmp_path), *words)
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert [result.reward for result in results] == [1.0] * 4, [result.fault for result in results]
    asked = [json.loads(line)["places"] for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert [[key for _start, _size, key in places] for places in asked] == [[CAT.key, DOG.key]] * 4


@pytest.mark.slow
def test_a_judge_that_takes_none_is_named(tmp_path: Path) -> None:
    """In one line."""
    done = roll_out(tmp_path, make_judged(tmp_path, takes_pictures=False))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "judge: its question has pictures, which need an engine with the capability pictures" in done.stderr
