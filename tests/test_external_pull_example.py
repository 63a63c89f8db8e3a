"""The example of a training loop whose agents run in other processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples/external_pull"


@pytest.mark.slow
def test_agents_elsewhere_fill_the_batches(tmp_path: Path) -> None:
    """Three agents solve and score 8 tasks of 4 episodes; one of them is killed. Each batch leads to new weights."""
    file = tmp_path / "control.json"
    command = [sys.executable, FOLDER / "train.py", file]
    train = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    agents = [subprocess.Popen([sys.executable, FOLDER / "agent.py", file]) for _ in range(3)]
    try:
        assert train.stdout is not None
        first = train.stdout.readline()
        agents[0].kill()
        rest, errors = train.communicate(timeout=240)
        codes = [agent.wait(timeout=600) for agent in agents[1:]]
    finally:
        for process in (train, *agents):
            process.kill()
            process.communicate()

    assert train.returncode == 0, errors
    # The log is on standard output too: a script that is no command of turnwise sets up its own.
    lines = [line for line in (first + rest).splitlines() if line.startswith("batch ")]
    assert len(lines) == 2
    means = []
    for number, line in enumerate(lines):
        form = rf"batch {number}: 16 episodes, (\d+) rows, 16 scored, mean ([01]\.\d+), now version {number + 1}"
        found = re.fullmatch(form, line)
        assert found is not None, line
        assert int(found[1]) >= 16
        means.append(float(found[2]))
    # A few of 32 sampled answers are right; how many is a matter of chance.
    assert max(means) > 0
    assert [0, 0] == codes
