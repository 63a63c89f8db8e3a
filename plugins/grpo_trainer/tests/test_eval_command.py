"""`turnwise eval` on the command line, with episodes that are given."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import fields, frozen

import turnwise_grpo_trainer.setup
from turnwise import EpisodeResult, Status, TrajectoryScore
from turnwise.cli import main
from turnwise.protocols import Resources
from turnwise.registry import NoConfig
from turnwise_grpo_trainer.eval_command import EvalCommand
from turnwise_grpo_trainer.setup import Setup, read_setup

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples" / "train_calculator.yaml"


@frozen
class GivenEpisodes(Setup):
    """What a config says, with episodes that need no engine: right ones, but for one that failed."""

    def manager(self, observers=()):
        """Return what stands in for a rollout."""
        return nullcontext(SimpleNamespace(rollout=self.rollout))

    def rollout(self, tasks, *, global_step, validation):
        """Return n episodes of each task."""
        return [
            EpisodeResult(
                task=task,
                rollout_n=number,
                status=Status.COMPLETED if task is not tasks[0] or number else Status.FAILED,
                scores=(TrajectoryScore(value=1.0),),
            )
            for task in tasks
            for number in range(self.run.rollout.validation_n)
        ]


@frozen
class NoRollout(Setup):
    """What a config says, and no rollout may start."""

    def manager(self, observers=()):
        """Fail."""
        raise AssertionError("a rollout began")


@pytest.fixture
def evaluate(monkeypatch):
    """Run `turnwise eval` on the example, with a kind of setup."""

    def run(kind, *arguments):
        def read(*args, **options):
            setup = read_setup(*args, **options)
            return kind(*(getattr(setup, field.name) for field in fields(Setup)))

        monkeypatch.setattr(turnwise_grpo_trainer.setup, "read_setup", read)
        return main(["eval", str(CONFIG), "rollout.validation_n=4", *arguments])

    return run


def test_a_failed_episode_costs_no_result(evaluate, tmp_path, capsys):
    """Its task is left out of pass@4: the table says so, and the file, whose folder is made, has it all."""
    out = tmp_path / "new" / "eval.json"

    assert 0 == evaluate(GivenEpisodes, "--k", "1,4", "--out", str(out))

    said = capsys.readouterr().out
    assert "64 tasks, 4 samples each" in said
    assert "1 of 256 episodes have no score: 1 failed\n" in said
    assert "pass@4 leaves out 1 of 64 tasks, which have fewer scored samples\n" in said
    figure = json.loads(out.read_text())["results"]["all"]["pass@4"]
    assert {"value": 1.0, "low": 1.0, "high": 1.0, "tasks": 63, "left_out": 1} == figure
    assert [out] == list(out.parent.iterdir())


def test_too_large_a_k(evaluate, capsys):
    """It is refused before anything runs."""
    assert 2 == evaluate(NoRollout, "--k", "1,5")
    assert "turnwise: error: --k 5: rollout.validation_n is only 4\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "text"),
    [("folder", "not a file"), ("file/eval.json", "cannot be written"), ("o" * 300, "cannot be written")],
)
def test_no_place_for_the_results(evaluate, tmp_path, capsys, out, text):
    """A folder, a file in a file and an impossible name are refused in one line before anything runs."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    assert 2 == evaluate(NoRollout, "--out", str(tmp_path / out))

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"turnwise: error: --out {tmp_path / out}: {text}")
    assert {"folder", "file"} == {path.name for path in tmp_path.iterdir()}


def test_examples_in_the_help(monkeypatch):
    """They parse, and a trained model is looked for where the command is typed, not beside the config."""
    parser = argparse.ArgumentParser()
    EvalCommand(NoConfig(), Resources()).add_arguments(parser)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PWD", str(ROOT))

    lines = [os.path.expandvars(line) for line in parser.epilog.splitlines() if line.startswith("  turnwise eval")]
    options = [parser.parse_args(shlex.split(line)[2:]) for line in lines]
    setups = [read_setup(each.config, each.overrides, needs_train=False) for each in options]

    assert ["1", "1,4,16", "1"] == [each.k for each in options]
    assert [8, 16, 8] == [setup.run.rollout.validation_n for setup in setups]
    assert ROOT / "runs" / "train" / "model" == setups[2].spec.path
