"""`turnwise train` and `turnwise eval` as a user runs them, with an engine that repeats itself to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
SEEDED = Path(__file__).with_name("turnwise_seeded.py")
CONFIG = """
model:
  path: package:turnwise_calculator_demo
data:
  path: tasks.jsonl
  validation_path: tasks.jsonl
engine:
  name: seeded
agent: single_turn
reward: even_ids
rollout:
  n: 3
  prompt_length: 64
  response_length: 8
  validation_n: 2
  validation_sampling:
    temperature: 1.0
train:
  num_steps: 3
  tasks_per_step: 3
  optimizer:
    lr: 1e-3
  policy:
    device: cpu
  checkpoint:
    every: 1
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the plugin, as `pip install` would leave it, the config and its tasks."""
    (tmp_path / "turnwise_seeded.py").write_text(SEEDED.read_text(encoding="utf-8"), encoding="utf-8")
    info = tmp_path / "turnwise_seeded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turnwise-seeded\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise]\nseeded = turnwise_seeded\n")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + 1?"}], "uid": f"t{n}"} for n in range(5)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def started(site: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "turnwise.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(site: Path, *arguments: str) -> str:
    """Run a command to its end and return what it said."""
    out, err = started(site, *arguments).communicate()
    return out + err


def train(site: Path, name: str, *more: str) -> Path:
    """Train, and return the folder."""
    said = run(site, "train", str(site / "config.yaml"), *more, "--out", str(site / name))
    assert (site / name / "report.md").exists(), said
    return site / name


def steps_of(out: Path) -> list[dict[str, Any]]:
    """Return what was logged, but for what the clock said."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens/per_s", "validation/seconds", "wait", "cpu")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def assert_same(left: Path, right: Path) -> None:
    """The weights agree to the bit, and so do the logs."""
    one, two = (load_file(out / "model" / "model.safetensors") for out in (left, right))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    assert steps_of(left) == steps_of(right)


@pytest.mark.slow
def test_killed_and_resumed(site: Path) -> None:
    """Killed after each step, and in the middle of one, a training ends where it would have ended."""
    whole = train(site, "whole")

    for step, later in ((1, 0.0), (2, 0.0), (1, 0.4)):
        name = f"killed-{step}-{later}"
        process = started(site, "train", str(site / "config.yaml"), "--out", str(site / name))
        checkpoint = site / name / "checkpoints" / f"step-{step:08d}"
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(later)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (site / name / "report.md").exists()

        assert_same(whole, train(site, name, "--resume"))


@pytest.mark.slow
def test_modes(site: Path) -> None:
    """`hybrid` learns to the bit what `sync` learns; `async` never uses what is older than its bound."""
    sync = train(site, "sync")
    hybrid = train(site, "hybrid", "train.mode=hybrid")
    one, two = (load_file(out / "model" / "model.safetensors") for out in (sync, hybrid))
    assert all((one[name] == two[name]).all() for name in one)
    stages = ("sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "wake_up_kv_cache")
    trained = [line for line in steps_of(hybrid) if "reward/mean" in line]
    assert all(f"switch/{stage}_s" in line for line in trained for stage in stages)

    overlapping = train(
        site, "async", "train.mode=async", "train.num_steps=6", "train.buffer.max_staleness=1", "train.tasks_per_step=2"
    )
    staleness = [line["buffer/staleness"] for line in steps_of(overlapping) if "reward/mean" in line]
    assert 6 == len(staleness)
    assert max(staleness) <= 1


@pytest.mark.slow
def test_results_of_a_training(site: Path) -> None:
    """Curve, report, TensorBoard, a model that `from_pretrained` reads, and no gap to the rollout."""
    out = train(site, "out", "train.checkpoint.keep_last=1")

    assert b"\x89PNG" == (out / "curve.png").read_bytes()[:4]
    assert "| reward |" in (out / "report.md").read_text()
    assert list((out / "tensorboard").glob("events*"))
    assert ["step-00000003"] == [path.name for path in (out / "checkpoints").iterdir()]
    assert max(line["gap/max"] for line in steps_of(out) if "gap/max" in line) < 1e-5
    report = site / "eval.json"
    said = run(
        site, "eval", str(site / "config.yaml"), f"model.path={out / 'model'}", "--k", "1,2", "--out", str(report)
    )
    assert "pass@2" in said
    assert 5 == json.loads(report.read_text())["tasks"]


def refused(site: Path, *arguments: str) -> str:
    """Run a command that must end with code 2 and one line."""
    process = started(site, *arguments)
    _, err = process.communicate()
    assert 2 == process.returncode, err
    (line,) = [line for line in err.splitlines() if line.startswith("turnwise: error:")]
    return line


BAD: Sequence[tuple[tuple[str, ...], str]] = (
    (("train.optimizer.lrr=1",), "train.optimizer.lrr: unknown key; did you mean 'lr'?"),
    (("rollout.n=1",), "rollout.n: must be at least 2"),
    (("rollout.sampling.top_p=0.9",), "top_p must be 1"),
    (("train.tasks_per_step=6",), "is more than the 5 tasks"),
    (("train.mode=fast",), "train.mode: expected one of sync, hybrid, async"),
    (("engine.name=vlm",), "vlm"),
    (("model.path=nowhere",), "nowhere"),
)


@pytest.mark.parametrize(("overrides", "text"), BAD, ids=str)
def test_bad_input(site: Path, overrides: tuple[str, ...], text: str) -> None:
    """One line and exit code 2, before anything is started."""
    assert text in refused(site, "train", str(site / "config.yaml"), *overrides, "--dry-run")


def test_dry_run(site: Path) -> None:
    """It prints the plan and writes nothing."""
    said = run(site, "train", str(site / "config.yaml"), "--dry-run")

    assert "3 tasks x 3 = 9 episodes" in said
    assert not (site / "metrics.jsonl").exists()
