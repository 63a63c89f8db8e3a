"""The example of a training whose agent is an outside function with the `openai` client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_an_outside_agent_learns(tmp_path: Path) -> None:
    """Six steps raise the held-out reward, every training token was sampled, and no episode failed."""
    folder = ROOT / "examples/external_openai"
    long_steps = ["train.optimizer.lr=6e-4", "train.optimizer.warmup_steps=0", "train.algorithm.ppo_mini_batch_size=32"]
    options = [*long_steps, "train.num_steps=6", "rollout.validation_n=4", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "train", str(folder / "train.yaml"), *options],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["validation/reward/mean"] for line in lines if "validation/reward/mean" in line]
    assert held_out[-1] > held_out[0] + 0.1
    assert max(line["gap/max"] for line in lines if "gap/max" in line) < 1e-3
    assert all(line["status/failed"] == 0 for line in lines if "status/failed" in line)
