"""Processes of a run on Ray receive each picture once, as they count themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "picture_cost.py"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("starts_a_process")
def test_each_replica_receives_a_picture_once() -> None:
    """Two workers and two replicas show pictures of prompts and of a tool in many turns; every byte of them counts."""
    command = [sys.executable, str(BENCHMARK), "--ray", "--episodes", "24", "--kilobytes", "20", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass ") == 2, done.stdout
