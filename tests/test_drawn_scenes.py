"""Drawn scenes from the task source to the files of results, by the command line, with the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from turnwise.cli import main
from turnwise_drawn_scenes import model_dir
from turnwise_drawn_scenes.scenes import PATTERNS
from turnwise_result_files import read_results

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "examples/train_scenes.yaml")
FEW = ["rollout.n=4", "data.path=drawn_scenes:test?num_tasks=4"]


def test_a_rollout_shows_what_the_tool_cut(tmp_path: Path) -> None:
    """Each record has the scene and a picture for each good call, and an answer has the reward of its pattern."""
    assert main(["rollout", CONFIG, *FEW, "--out", str(tmp_path / "out")]) == 0
    results = read_results(tmp_path / "out")

    assert len(results) == 16
    num_crops = 0
    for result in results:
        (record,) = result.trajectories
        shown = [each for each in result.messages if each["role"] == "tool" and not isinstance(each["content"], str)]
        num_crops += len(shown)
        assert len(record.pictures) == 1 + len(shown)
        answer = str(result.messages[-1]["content"]) if result.messages[-1]["role"] == "assistant" else ""
        assert result.task.ground_truth in PATTERNS
        assert float(answer.endswith(f" {result.task.ground_truth}.")) == result.reward
    assert num_crops > 0


def test_a_bad_option_of_the_source_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the path and the value that exists."""
    assert main(["rollout", CONFIG, "data.path=drawn_scenes:trian", "--out", str(tmp_path / "out")]) != 0
    assert "unknown split 'trian': expected train or test" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_step_sees_the_pixels_of_the_engine(tmp_path: Path) -> None:
    """The gap between engine and trainer is rounding error, and the weights change, those of the vision tower too."""
    # The example shortens its first steps to nothing, until it has measured the noise of its gradients.
    small = ["train.num_steps=2", "train.tasks_per_step=8", "train.optimizer.noise_adaptive=false"]
    small += ["rollout.validation_n=1", "data.validation_path=drawn_scenes:test?num_tasks=4"]
    out = tmp_path / "out"

    assert main(["train", CONFIG, *small, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "gap/max" in line]
    before, after = (load_file(each / "model.safetensors") for each in (model_dir(), out / "model"))
    assert len(steps) == 2
    assert all(line["gap/max"] < 1e-3 for line in steps)
    assert any((before[name] != after[name]).any() for name in before if "visual" in name)
