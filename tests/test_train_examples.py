"""The examples of training are what the trainer, its plugins and the placement take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnwise_grpo_trainer.placement import placement_of, plan_of
from turnwise_grpo_trainer.setup import read_setup

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("train_calculator", ()),
        ("train_torl", ()),
        ("train_parallel", ()),
        ("train_hybrid_vllm", ()),
        # The model of the how-to is not here; any other shows that the rest is right.
        ("train_7b", ("model.path=package:turnwise_torl_python",)),
    ],
)
def test_plan(name: str, overrides: tuple[str, ...]) -> None:
    """Every key, option and number of devices is checked; nothing is started."""
    setup = read_setup(str(ROOT / f"examples/{name}.yaml"), overrides)

    plan = dict(plan_of(setup))

    assert f"{setup.train.tasks_per_step} tasks x {setup.group_size}" in plan["a step"]


def test_devices_of_the_large_example() -> None:
    """Four GPUs roll out and four train, as the how-to says."""
    setup = read_setup(str(ROOT / "examples/train_7b.yaml"), ("model.path=package:turnwise_torl_python",))
    place = placement_of(setup)
    page = (ROOT / "docs/how-to/train-7b.md").read_text(encoding="utf-8")

    assert (4, 4, 8) == (place.rollout_gpus, place.trainer_gpus, place.total_gpus)
    assert re.search(r"`GPUs` must say 4, 4 and 8", page)


def test_splits_share_no_question() -> None:
    """What is held out is not trained on."""
    for name in ("train_calculator", "train_torl", "train_parallel"):
        setup = read_setup(str(ROOT / f"examples/{name}.yaml"))
        asked = {task.messages[-1]["content"] for task in setup.tasks}
        assert not asked & {task.messages[-1]["content"] for task in setup.validation_tasks}
