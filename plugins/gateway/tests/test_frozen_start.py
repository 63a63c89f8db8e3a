"""The objects of the start are frozen in processes of commands, and full garbage collections wait for growth."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from gateway_processes import serve, write_run
from gateway_rollouts import start_rollout, write_rollout

pytestmark = pytest.mark.usefixtures("starts_a_process")

AT_END = """
import atexit, gc, pathlib

thresholds = []
set_threshold = gc.set_threshold
gc.set_threshold = lambda *numbers: [thresholds.append(numbers[2]), set_threshold(*numbers)]
atexit.register(lambda: pathlib.Path(__file__).with_name("frozen").write_text(f"{gc.get_freeze_count()} {thresholds}"))
"""
"""In a plugin of the run: writes at the end how many objects are frozen, and the thresholds of full collections."""
MANY = 50_000
"""Fewer than the start of any command makes."""


def watch(folder: Path, module: str) -> None:
    """Let the plugin of a run write the file `frozen`."""
    (file,) = folder.rglob(f"{module}*.py")
    file.write_text(file.read_text() + AT_END)


def expect_rare_collections(folder: Path) -> None:
    """The start is frozen, and full collections wait for the growth of the process until the run ends."""
    (file,) = folder.rglob("frozen")
    num_frozen, *thresholds = map(int, re.findall(r"\d+", file.read_text()))
    assert MANY < num_frozen
    assert (thresholds[0] > 1_000_000, thresholds[-1]) == (True, gc.get_threshold()[2])


def test_a_served_gateway_freezes_its_start(tmp_path: Path) -> None:
    """When it listens, before its first session ends."""
    config = write_run(tmp_path)
    watch(tmp_path, "turnwise_served_parts")
    with serve(tmp_path, config, "--out", tmp_path / "out") as served:
        served.open(uid="t1")
        code, _, errors = served.stop()

    assert 0 == code, errors
    expect_rare_collections(tmp_path)


@pytest.mark.slow
def test_a_rollout_freezes_its_start(tmp_path: Path) -> None:
    """When its engine and workers, such as those of a task pool, have started."""
    program = Path(__file__).parent / "programs" / "call_plainly.py"
    write_rollout(tmp_path, 1, {"command": ["python", str(program), "score"]}, max_in_flight=1)
    watch(tmp_path, "acme_one_reply")
    with start_rollout(tmp_path, "run.yaml", "--out", "out") as process:
        assert process.wait(600) == 0, (tmp_path / "log").read_text()

    expect_rare_collections(tmp_path)
