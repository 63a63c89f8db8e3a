"""`turnwise trl` with the shipped model, TRL's real trainers and the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--async",)])
def test_the_command_trains(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Three small steps log rewards, train on the sampled policy and save the model."""
    out = tmp_path / "out"
    command = [Path(sys.executable).with_name("turnwise"), "trl", ROOT / "examples/calculator.yaml", "rollout.n=4"]
    options = ["data.limit=6", "--prompts", "3", "--steps", "3", "--learning-rate", "1e-4", "--out", out, *flags]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    log = json.loads((out / "log.json").read_text(encoding="utf-8"))
    steps = [entry for entry in log if "reward" in entry]
    assert "mean reward" in done.stdout
    assert len(steps) >= 2
    assert all(0 <= entry["reward"] <= 1 for entry in steps)
    assert (out / "model.safetensors").is_file()
    if not flags:  # each step trains on samples of the current weights, so no ratio is clipped
        assert [entry["clip_ratio/region_mean"] for entry in steps] == [0] * len(steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.n=1"], "must be at least 2, got 1"),
        pytest.param(["rollout.n=4", "rollout.sampling.top_p=0.5"], "set top_p=1.0", marks=pytest.mark.slow),
        (["rollout.n=4", "model.path=null"], "model.path is not set"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Invalid input exits with 2 and a one-line error that names the setting."""
    command = [Path(sys.executable).with_name("turnwise"), "trl", ROOT / "examples/calculator.yaml", *arguments]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", "--steps", "1"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
