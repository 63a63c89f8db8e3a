"""`turnwise eval` on the command line, with given episodes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path

import pytest

from turnwise import EpisodeResult, Status, TrajectoryScore, load_resolved
from turnwise.cli import main
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise_grpo_trainer.commands import eval_command
from turnwise_grpo_trainer.commands.eval_command import EvalCommand

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "examples" / "train_calculator.yaml"


def episodes_of(setup, *, status=lambda _place: Status.COMPLETED, reward=1.0):
    """Return the episodes of a validation without rolling them out; a place is (task, rollout)."""
    return [
        EpisodeResult(
            task=task,
            rollout_n=number,
            status=status((place, number)),
            scores=() if reward is None else (TrajectoryScore(value=reward),),
        )
        for place, task in enumerate(setup.validation_tasks)
        for number in range(setup.run.rollout.validation_n)
    ]


def one_failed(setup):
    """Return solved episodes, except for one that failed."""
    return episodes_of(setup, status=lambda place: Status.FAILED if place == (0, 0) else Status.COMPLETED)


def no_rollout(_setup):
    """Fail the test."""
    raise AssertionError("the rollout was started")


@pytest.fixture
def evaluate(monkeypatch):
    """Run `turnwise eval` on the example config, with a function in place of the rollout."""

    def run(roll_out, *arguments):
        def roll_out_to(folder, setup, _arguments):
            folder.mkdir(parents=True)
            return roll_out(setup)

        monkeypatch.setattr(eval_command, "roll_out", roll_out)
        monkeypatch.setattr(eval_command, "roll_out_to", roll_out_to)
        return main(["eval", str(CONFIG), "rollout.validation_n=4", *arguments])

    return run


def test_a_failed_episode_is_excluded(evaluate, tmp_path, capsys):
    """Its task is left out of pass@4, a note says so, and the results are written to a new folder."""
    out = tmp_path / "new" / "eval"

    assert 0 == evaluate(one_failed, "--k", "1,4", "--out", str(out))

    printed = capsys.readouterr().out
    assert "64 tasks, 4 samples each" in printed
    assert "1 of 256 episodes have no score: 1 failed\n" in printed
    assert "pass@4 leaves out 1 of 64 tasks, which have fewer scored samples\n" in printed
    figure = json.loads((out / "evaluation.json").read_text())["results"]["all"]["pass@4"]
    low = figure.pop("low")
    assert {"value": 1.0, "high": 1.0, "tasks": 63, "left_out": 1} == figure
    assert 0.9 < low < 1.0  # of Wilson's interval: 63 equal tasks do not show that all others are too


def test_too_large_a_k(evaluate, capsys):
    """A k above `rollout.validation_n` is refused before the rollout."""
    assert 2 == evaluate(no_rollout, "--k", "1,5")
    assert "turnwise: error: --k 5: rollout.validation_n is only 4\n" == capsys.readouterr().err


def test_examples_in_the_help(monkeypatch):
    """The examples parse, and the path of a trained model is relative to the working directory."""
    parser = argparse.ArgumentParser()
    EvalCommand(NoConfig(), Resources()).add_arguments(parser)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PWD", str(ROOT))

    lines = [os.path.expandvars(line) for line in parser.epilog.splitlines() if line.startswith("  turnwise eval")]
    options = [parser.parse_args(shlex.split(line)[2:]) for line in lines]
    runs = [load_resolved(each.config, each.overrides)[0] for each in options if each.config]

    assert ["1", "1,4,16", "1", "1,4,16"] == [each.k for each in options]
    assert [8, 16, 8] == [run.rollout.validation_n for run in runs]
    assert str(ROOT / "runs" / "train" / "model") == runs[2].model.path


@pytest.mark.parametrize("k", ["0", "1,x", "", "-2", "1.5"])
def test_a_k_that_is_no_positive_integer(evaluate, capsys, k):
    """The error names the option, the value and the expected form."""
    assert 2 == evaluate(no_rollout, f"--k={k}")
    assert f"turnwise: error: --k {k}: expected positive integers, such as 1,8\n" == capsys.readouterr().err


def test_no_other_tasks_are_needed(evaluate, capsys):
    """A config for an evaluation has the held-out tasks alone."""
    assert 0 == evaluate(episodes_of, "data.path=null")
    assert "64 tasks, 4 samples each" in capsys.readouterr().out


def test_no_held_out_tasks(evaluate, capsys):
    """A config without validation data is refused before the rollout."""
    assert 2 == evaluate(no_rollout, "data.validation_path=null")
    assert "data.validation_path: missing; eval needs a file of held-out tasks" in capsys.readouterr().err


def test_repeated_ks_are_reported_once(evaluate, capsys, tmp_path):
    """`--k 4,1,4` reports pass@1 and pass@4, in ascending order."""
    out = tmp_path / "eval"
    assert 0 == evaluate(one_failed, "--k", "4,1,4", "--out", str(out))

    names = list(json.loads((out / "evaluation.json").read_text())["results"]["all"])
    assert ["mean@4", "solved@4", "pass@1", "pass@4"] == names


def test_threshold(evaluate, tmp_path):
    """An episode is solved from this reward on; the mean reward does not depend on it."""

    def half(setup):
        return episodes_of(setup, reward=0.5)

    def results(threshold):
        out = tmp_path / str(threshold)
        assert 0 == evaluate(half, "--threshold", str(threshold), "--out", str(out))
        figures = json.loads((out / "evaluation.json").read_text())["results"]["all"]
        return figures["mean@4"]["value"], figures["solved@4"]["value"]

    assert (0.5, 1.0) == results(0.5)
    assert (0.5, 0.0) == results(0.75)


def test_all_episodes_failed(evaluate, capsys, tmp_path):
    """If every episode failed, the command fails with the first cause and writes no file."""

    def failed(setup):
        return episodes_of(setup, status=lambda _place: Status.FAILED)

    out = tmp_path / "eval"
    assert 1 == evaluate(failed, "--out", str(out))

    assert "all 256 episodes failed, the first by unknown" in capsys.readouterr().err
    assert not (out / "evaluation.json").exists()


def test_the_step_of_the_seeds(evaluate):
    """`--step`, or the config, gives the training step from which the rollout derives its seeds."""
    seen = []

    def record(setup):
        seen.append(setup.run.rollout.global_step)
        return episodes_of(setup)

    assert 0 == evaluate(record, "--step", "7")
    assert 0 == evaluate(record, "rollout.global_step=3")
    assert [7, 3] == seen


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--step", "-1", "expected at least 0"),
        ("--threshold", "nan", "expected a finite number"),
        ("--threshold", "inf", "expected a finite number"),
        ("--threshold", "-inf", "expected a finite number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(evaluate, capsys, option, value, expected):
    """The error names the option and the value, before the rollout."""
    assert 2 == evaluate(no_rollout, f"{option}={value}")
    assert f"turnwise: error: {option} {value}: {expected}\n" == capsys.readouterr().err
