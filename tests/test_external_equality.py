"""An outside agent with the `openai` client equals `tool_agent` token for token: rollouts, and the trained model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin

EXAMPLES = Path(__file__).parents[1] / "examples"
INSIDE = EXAMPLES / "train_calculator.yaml"
OUTSIDE = EXAMPLES / "external_openai/train.yaml"
PROGRAM = f"{{name: external, command: [python, '{EXAMPLES / 'external_openai/agent.py'}']}}"
SEEDED = "engine={name: seeded}"
"""An engine whose samples depend on nothing but the weights and the seed of the request."""

Run = Callable[..., None]

pytestmark = pytest.mark.slow


@pytest.fixture
def turnwise(tmp_path: Path) -> Run:
    """Runs a command with the engine `seeded` and the function of the example."""
    source = Path(__file__).with_name("turnwise_seeded.py").read_text(encoding="utf-8")
    install_plugin(tmp_path, "turnwise_seeded", source, entry="seeded")
    paths = os.pathsep.join((str(tmp_path), str(EXAMPLES / "external_openai")))

    def run(command: str, config: Path, out: Path, *overrides: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "turnwise.cli", command, str(config), SEEDED, "--out", str(out), *overrides],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def test_rollouts_are_equal(turnwise: Run, tmp_path: Path) -> None:
    """The function and the program leave the tokens, masks, log-probabilities and rewards of `tool_agent`."""
    agent = (f"agent={PROGRAM}", f"agents.tool_agent={PROGRAM}")
    options = ("data.limit=4", "rollout.n=2")
    turnwise("rollout", INSIDE, tmp_path / "inside", *options)
    turnwise("rollout", OUTSIDE, tmp_path / "function", *options)
    turnwise("rollout", OUTSIDE, tmp_path / "program", *options, *agent)

    inside, function, program = (contents(tmp_path / name) for name in ("inside", "function", "program"))
    assert 8 == len(inside)
    assert any(len(turns) > 1 for *_, turns in inside.values())
    assert inside == function
    assert inside == program


def contents(out: Path) -> dict[tuple[str, int], tuple[object, ...]]:
    """Return everything of the only record of each episode that enters a loss, and its turns."""
    found = {}
    for result in read_results(out / "trajectories.parquet"):
        (record,) = result.trajectories
        columns = [record.input_ids, record.response_mask, record.logprobs]
        values = [column.tolist() for column in columns]
        found[result.task.uid, result.rollout_n] = (*values, result.reward, result.status, list(record.turns()))
    return found


def test_trainings_are_equal(turnwise: Run, tmp_path: Path) -> None:
    """Two steps give the same rewards and gradients and, to the bit, the same weights."""
    options = ("data.validation_path=", "train.num_steps=2", "train.tasks_per_step=2", "rollout.n=4")
    # The first steps must move the weights; those of `noise_adaptive` wait for evidence. With 512 tasks these steps
    # have no malformed call, of which `tool_agent` tells the model, while the outside program sees no call and ends.
    options += ("train.optimizer.noise_adaptive=false", "train.optimizer.lr=3.75e-5", "data.limit=512")
    turnwise("train", INSIDE, tmp_path / "inside", *options)
    turnwise("train", OUTSIDE, tmp_path / "outside", *options)

    steps, weights = zip(*(learnt(tmp_path / name) for name in ("inside", "outside")), strict=True)
    assert steps[0] == steps[1]
    assert 2 == len(steps[0])
    assert any(gradient > 0 for _, gradient in steps[0])
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def learnt(out: Path) -> tuple[list[tuple[float, float]], dict[str, object]]:
    """Return mean reward and norm of the gradient of each step, and the trained weights."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [(line["reward/mean"], line["actor/grad_norm"]) for line in lines if "reward/mean" in line]
    return steps, load_file(out / "model/model.safetensors")
