"""Random states: a resumed training draws the same numbers as an undisturbed one, in every process."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from turnwise_grpo_trainer.build import build_learner_spec
from turnwise_grpo_trainer.config import LoraConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.model_state import load_state, save_state
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, load_local_trainer
from turnwise_grpo_trainer.train_setup import read_setup
from turnwise_result_files import save_batch

SCRIPT = Path(__file__).parents[1] / "dropout_process.py"
EXAMPLE = str(Path(__file__).parents[4] / "examples" / "train_calculator.yaml")
TRAIN = TrainConfig(
    optimizer=OptimizerConfig(lr=1e-3),
    policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=64),
    lora=LoraConfig(rank=4, dropout=0.2),
)


def draw():
    """Draw a number from each generator."""
    return torch.rand(1).item(), np.random.random(), random.random()


def adapters(learner):
    return {name: tensor.clone() for name, tensor in learner.policy.adapter_weights()}


def load(spec, seed=5):
    return load_local_trainer(LearnerSpec(TRAIN, spec, 1.0, 64, seed=seed)).learner


def train(spec, batch, folder=None):
    """Make four updates with dropout, with a restart after two if there is a folder; return the adapters."""
    learner = load(spec)
    for step in range(1, 5):
        learner.update(batch, step=step, version=0)
        if step == 2 and folder is not None:
            save_state(learner, folder)
            draw()
            learner = load(spec)
            load_state(learner, folder)
    return adapters(learner)


@pytest.mark.slow
def test_a_resumed_training_draws_the_same_dropout(tmp_path, spec, conversations):
    """The adapters are the same as without the restart, to the bit."""
    whole, resumed = train(spec, conversations), train(spec, conversations, tmp_path)

    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_seed_of_the_run_decides(spec, conversations):
    """Equal seeds give equal adapters and random numbers, other seeds give others; the seed is `rollout.seed`."""
    torch.manual_seed(1)
    (first, number), (again, same), (_, other) = ((adapters(load(spec, seed)), draw()[0]) for seed in (5, 5, 6))

    assert number == same
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert number != other
    setup = read_setup(EXAMPLE, ["rollout.seed=11"])
    assert 11 == build_learner_spec(setup).seed


def test_each_process_has_its_generators(tmp_path, spec):
    """The generators of torch, numpy and Python continue in each process, whichever process writes last."""
    learner = load(spec)
    expected = {}
    for rank in (0, 1):
        learner.rank, learner.world_size = rank, 2
        draw()
        save_state(learner, tmp_path)
        expected[rank] = draw()
    assert expected[0] != expected[1]
    for rank in (1, 0):
        learner.rank = rank
        load_state(learner, tmp_path)
        assert expected[rank] == draw()


def test_another_number_of_processes_is_logged(tmp_path, spec):
    """The generators stay as they are, and a line says why."""
    learner = load(spec)
    save_state(learner, tmp_path)
    learner.world_size = 2
    state = torch.get_rng_state()

    with capture_logs() as lines:
        load_state(learner, tmp_path)

    assert torch.equal(state, torch.get_rng_state())
    (line,) = lines
    assert line["event"].startswith("random states are not restored")
    assert line["reason"].startswith("random-0-of-2.json is missing")


@pytest.mark.slow
def test_resumed_processes_draw_the_same_dropout(tmp_path, model_dir, conversations):
    """The adapters of two processes are the same as without the restart, to the bit."""
    shutil.copytree(model_dir, tmp_path / "model")
    save_batch(conversations, tmp_path / "batch.safetensors")
    for restart in ("no", "yes"):
        command = [sys.executable, "-W", "ignore", SCRIPT]
        processes = [
            subprocess.Popen([*command, str(rank), "2", tmp_path, restart], stderr=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        outputs = [process.communicate(timeout=300) for process in processes]
        assert [0, 0] == [process.returncode for process in processes], outputs

    whole, resumed = (load_file(tmp_path / f"world2-{each}" / "weights.safetensors") for each in ("no", "yes"))
    assert whole
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
