"""A driver that is killed leaves no process, no shared memory and no temporary file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from shared_segments import segments_of

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
PROCESS_TOOL = """
model: {path: "package:turnwise_calculator_demo"}
data: {path: CALCULATOR}
engine: {name: transformers}
agent: {name: tool_agent}
parser: hermes
modules: [leaking_tools]
tools: [{name: "leaking_tools:calculator", run_in: process}]
reward: exact_match
rollout: {n: 4, prompt_length: 256, response_length: 256, sampling: {temperature: 1.0}}
"""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail when it does not come true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that its parent has not waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """A list of processes that are killed at the end of the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_driver(tmp_path: Path, family: list[psutil.Process], number: signal.Signals) -> None:
    """It is killed or terminated while tools run in processes that have forked."""
    temporary, pids = tmp_path / "tmp", tmp_path / "pids"
    temporary.mkdir()
    pids.mkdir()
    config = tmp_path / "config.yaml"
    config.write_text(PROCESS_TOOL.replace("CALCULATOR", str(ROOT / "examples" / "calculator.jsonl")))
    environment = {**os.environ, "TMPDIR": str(temporary), "TURNWISE_TEST_PIDS": str(pids), "PYTHONPATH": str(HERE)}
    driver = subprocess.Popen(
        [sys.executable, "-m", "turnwise.cli", "rollout", str(config), "--out", str(tmp_path / "out")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family.append(psutil.Process(driver.pid))

    def tools_run() -> bool:
        assert driver.poll() is None, driver.communicate()
        return len(list(pids.iterdir())) >= 8  # four processes, each with a child

    wait_until(tools_run)
    children = running_children(driver.pid)
    family.extend(children)
    assert len(children) >= 8

    driver.send_signal(number)
    driver.communicate()

    wait_until(lambda: not any(map(is_alive, children)))
    assert segments_of([driver.pid, *(each.pid for each in children)]) == []
    # torch makes a folder for its compiler, which this test does not judge.
    assert [] == [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def running_children(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    return [child for child in psutil.Process(pid).children(recursive=True) if is_alive(child)]
