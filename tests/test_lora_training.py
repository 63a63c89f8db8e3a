"""Trainings with adapters from the command line: they learn, resume, and send only what the engine needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file
from training_site import ROOT, make_site, run, start, steps_of, train

import turnwise_calculator_demo

NUM_ADAPTED = 4 * 7
"""Adapted modules of the demo model: seven in each of four layers."""


@pytest.mark.slow
def test_adapters_learn_the_calculator(tmp_path: Path) -> None:
    """
    In ten steps the held-out reward rises as with all weights, and the gap stays rounding error.

    The engine got 256 KiB in each step, where the model has 2.4 MiB, and no frozen weight of the model has changed.
    """
    long_steps = ["train.optimizer.lr=3e-3", "train.optimizer.warmup_steps=0", "train.algorithm.ppo_mini_batch_size=32"]
    options = ["train.lora.rank=8", *long_steps, "train.num_steps=10", "rollout.validation_n=4"]
    output = run(ROOT, "train", str(ROOT / "examples/train_calculator.yaml"), *options, "--out", str(tmp_path / "out"))

    assert (tmp_path / "out" / "report.md").exists(), output
    lines = steps_of(tmp_path / "out")
    before, after = (line["validation/reward/mean"] for line in lines if "validation/reward/mean" in line)
    assert after > before + 0.25
    assert max(line["gap/max"] for line in lines if "gap/max" in line) < 1e-4
    model = load_file(tmp_path / "out" / "model" / "model.safetensors")
    (file,) = Path(turnwise_calculator_demo.__file__).parent.glob("**/model.safetensors")
    base = load_file(file)
    changed = {name for name in base if (model[name] != base[name]).any()}
    assert NUM_ADAPTED == len(changed)
    assert all(name.endswith("proj.weight") for name in changed)
    num_adapters = sum(8 * sum(base[name].shape) for name in changed)
    num_bytes = {line["sync/bytes"] for line in lines if "sync/bytes" in line}
    assert num_bytes == {4.0 * num_adapters}
    assert 4 * num_adapters < sum(weight.nbytes for weight in base.values()) / 8


@pytest.mark.slow
def test_a_resume_is_exact(tmp_path: Path) -> None:
    """
    A training in two parts ends with the bits and the log of one in a single part, also on shared devices.

    The engine of these trainings cannot apply adapters, so it gets all weights, merged.
    """
    site = make_site(tmp_path)
    lora = ("train.lora.rank=2", "train.lora.target_modules=[q_proj, up_proj]")
    whole = train(site, "whole", *lora)
    parts = train(site, "parts", *lora, "train.num_steps=2")
    hybrid = train(site, "hybrid", *lora, "memory.mode=hybrid")
    run(site, "train", str(site / "config.yaml"), *lora, "--out", str(parts), "--resume")

    assert [line for line in steps_of(whole) if "reward/mean" in line] == [
        line for line in steps_of(parts) if "reward/mean" in line
    ]
    one, two, three = (load_file(out / "model" / "model.safetensors") for out in (whole, parts, hybrid))
    assert all((one[name] == two[name]).all() and (one[name] == three[name]).all() for name in one)
    sizes = {line["sync/bytes"] for line in steps_of(whole) if "sync/bytes" in line}
    assert sizes == {float(sum(weight.nbytes for weight in one.values()))}


@pytest.mark.slow
def test_an_engine_that_cannot_apply_adapters(tmp_path: Path) -> None:
    """A config that demands adapters ends with one line and exit code 2 before the first step."""
    site = make_site(tmp_path)
    process = start(site, "train", str(site / "config.yaml"), "train.lora.sync=adapters", "--out", str(site / "out"))
    _, err = process.communicate()

    assert 2 == process.returncode, err
    (line,) = [line for line in err.splitlines() if line.startswith("turnwise: error:")]
    assert "train.lora.sync: the engine 'seeded' does not apply adapters; set it to merged or auto" in line
