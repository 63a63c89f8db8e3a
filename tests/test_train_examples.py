"""The training examples have valid options, fit their devices, and hold out unseen tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import turnwise_calculator_demo
from turnwise.cli import main
from turnwise_grpo_trainer.processes.placement import describe_plan, place_training
from turnwise_grpo_trainer.train_setup import read_setup

ROOT = Path(__file__).parents[1]


@pytest.mark.many_cases(4)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("train_calculator", ()),
        ("train_torl", ()),
        ("train_parallel", ()),
        ("train_gymnasium", ()),
        ("train_scenes", ()),
        ("distill_calculator", ()),
        ("train_hybrid_vllm", ()),
        # The how-to's model is not installed. Any other model checks the rest of the config.
        ("train_7b", ("model.path=package:turnwise_torl_python",)),
    ],
)
def test_plan(name: str, overrides: tuple[str, ...]) -> None:
    """Keys, plugin options and device counts of an example are valid; the check starts nothing."""
    setup = read_setup(str(ROOT / f"examples/{name}.yaml"), overrides)

    plan = dict(describe_plan(setup))

    assert f"{setup.train.tasks_per_step} tasks x {setup.group_size}" in plan["a step"]


def test_the_large_example_uses_eight_gpus() -> None:
    """Four GPUs roll out and four train, and the how-to has these numbers."""
    setup = read_setup(str(ROOT / "examples/train_7b.yaml"), ("model.path=package:turnwise_torl_python",))
    place = place_training(setup)
    page = (ROOT / "docs/how-to/train-7b.md").read_text(encoding="utf-8")

    assert (4, 4, 8) == (place.rollout_gpus, place.trainer_gpus, place.total_gpus)
    assert re.search(r"`GPUs` must say 4, 4\s+and\s+8", page)


def test_splits_share_no_question() -> None:
    """No held-out question is a training question."""
    for name in ("train_calculator", "train_torl", "train_parallel"):
        setup = read_setup(str(ROOT / f"examples/{name}.yaml"))
        asked = {task.messages[-1]["content"] for task in setup.tasks}
        assert not asked & {task.messages[-1]["content"] for task in setup.validation_tasks}


@pytest.mark.slow
def test_a_step_in_an_environment_of_gymnasium(tmp_path: Path) -> None:
    """The example trains the model on the rewards of a third party's environment: its weights change."""
    small = ["train.num_steps=1", "rollout.n=8", "train.tasks_per_step=2", "train.validation.every=0"]
    out = tmp_path / "out"

    assert main(["train", str(ROOT / "examples/train_gymnasium.yaml"), *small, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (step,) = [line for line in lines if "reward/mean" in line]
    before = load_file(Path(str(turnwise_calculator_demo.__file__)).parent / "model" / "model.safetensors")
    after = load_file(out / "model" / "model.safetensors")
    assert step["step"] == 1
    assert any((before[name] != after[name]).any() for name in before)
