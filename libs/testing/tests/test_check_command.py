"""`turnwise check` of parts that need more than a name: options of a training, and tasks of their own."""

import json
from textwrap import dedent

import pytest

from turnwise.cli import main
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import write_scripted_run

SOURCE = """
    from typing import Any

    from attrs import frozen

    import turnwise
    from turnwise import TrajectoryScore
    from turnwise.errors import ConfigError, DataError


    @frozen
    class Options:
        path: str | None = None

        def __attrs_post_init__(self):
            if self.path is None:
                raise ConfigError("path: must be set")


    class Scorer:
        def check(self, run): ...

        def start(self, run): ...

        def score(self, episodes):
            raise RuntimeError(f"it reads {self.path}")


    def make_scorer(options, resources):
        scorer = Scorer()
        scorer.path = options.path
        return scorer


    class Reward:
        def score(self, episode):
            if episode.task.ground_truth != "blue":
                raise DataError(f"task {episode.task.uid!r} has no colour")
            return TrajectoryScore(value=1.0)


    class Hanging:
        async def score(self, episode):
            import asyncio

            await asyncio.Event().wait()


    @turnwise.hookimpl
    def register_rewards(registry):
        registry.add("picky", lambda options, resources: Reward())
        registry.add("hanging", lambda options, resources: Hanging())


    @turnwise.hookimpl
    def register_scorers(registry):
        registry.add("picky_scorer", make_scorer, Options)
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Run `turnwise check` with a plugin that is installed for the test, and return the exit code and the lines."""
    site = tmp_path / "site"
    install_plugin(site, "needy_parts", dedent(SOURCE))
    monkeypatch.syspath_prepend(str(site))

    def run(name, *arguments):
        code = main(["check", name, *arguments])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def write_config(folder, **sections):
    """Write a config of tasks that the reward `picky` is for."""
    file = write_scripted_run(folder, num_tasks=1, plugins=None, **sections)
    task = {"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "blue"}
    (folder / "data.jsonl").write_text(json.dumps(task) + "\n")
    return str(file)


def test_a_part_that_needs_options_fails_once(check):
    """One line says so, and not one for each of its checks."""
    code, text = check("picky_scorer")

    assert (1, 1) == (code, text.count("failed"))
    assert "failed picky_scorer: is_built (picky_scorer: path: must be set (--config: a run's config with the" in text


@pytest.mark.parametrize(
    "train",
    [{"scorers": [{"name": "picky_scorer", "path": "here"}]}, {"scorers": {"name": "picky_scorer", "path": "here"}}],
)
def test_options_in_the_section_of_a_training(check, tmp_path, train):
    """A part that a trainer's section names has its options from there."""
    code, text = check("picky_scorer", "--config", write_config(tmp_path, train=train))

    assert code == 1
    assert "passed picky_scorer: fulfils_the_protocol" in text
    assert "RuntimeError: it reads here" in text


def test_a_reward_for_other_tasks(check, tmp_path):
    """Its checks are skipped with its reason; with the tasks of a config they run."""
    code, text = check("picky")
    assert code == 0
    assert "passed picky: fulfils_the_protocol" in text
    assert "skipped picky: returns_a_score (it scores other tasks, which its own RewardSuite has: task" in text
    assert "Traceback" not in text

    code, text = check("picky", "--config", write_config(tmp_path))
    assert code == 0
    assert "passed picky: returns_a_score" in text
    assert "skipped" not in text


def test_a_reward_that_hangs(check):
    """It fails its checks, and is not taken for one of other tasks."""
    code, text = check("hanging", "--timeout-s", "0.2")

    assert code == 1
    assert "failed hanging: returns_a_score (nothing came within 0.2 s" in text
