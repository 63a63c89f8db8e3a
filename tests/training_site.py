"""Runs trainings from the command line, in a folder with a config, tasks, and an engine deterministic to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from turnwise_testing.whole_runs.installation import install_plugin

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
observers: [witness]
postprocessors: [seen]
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


def make_site(folder: Path) -> Path:
    """Create a config, its tasks, and the plugin as `pip install` would leave it, in a folder; return the folder."""
    install_plugin(folder, "turnwise_seeded", SEEDED.read_text(encoding="utf-8"), entry="seeded")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    write_tasks(folder / "tasks.jsonl", 5)
    return folder


def write_tasks(path: Path, num: int) -> None:
    """Write tasks `t0`, `t1`, ..."""
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + 1?"}], "uid": f"t{n}"} for n in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def start(
    site: Path, *arguments: str, preexec_fn: Callable[[], None] | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start a command, with additional environment variables, after a function in its process."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "turnwise.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=preexec_fn,
    )


def run(site: Path, *arguments: str, **variables: str) -> str:
    """Run a command and return its output."""
    out, err = start(site, *arguments, **variables).communicate()
    return out + err


def train(site: Path, name: str, *more: str, **variables: str) -> Path:
    """Train to the end, and return the output folder."""
    output = run(site, "train", str(site / "config.yaml"), *more, "--out", str(site / name), **variables)
    assert (site / name / "report.md").exists(), output
    return site / name


def steps_of(out: Path) -> list[dict[str, Any]]:
    """Return the logged metrics without the ones that depend on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    costs = ("seconds", "cpu", "memory")
    timed = ("tokens/per_s", "wait", *costs, *(f"validation/{name}" for name in costs))
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def assert_same(left: Path, right: Path) -> None:
    """Check that two trainings have the same weights, to the bit, and the same logs."""
    one, two = (load_file(out / "model" / "model.safetensors") for out in (left, right))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    assert steps_of(left) == steps_of(right)
