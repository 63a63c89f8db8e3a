"""The end of a run that has started Ray itself; `test_ends.py` has the ends after parts of Ray have stopped or died."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray_runs import wait_until

from turnwise_testing.whole_runs.scripted_run import environment_of, write_scripted_run

MARK = "TURNWISE_TEST_RUN"
"""Variable in the environment of every process of a run."""


def start(folder: Path) -> subprocess.Popen[str]:
    """Start a rollout that starts Ray."""
    runtime = {"name": "ray", "num_workers": 1, "num_replicas": 1}
    config = write_scripted_run(folder, num_tasks=2, runtime=runtime)
    command = [sys.executable, "-m", "turnwise.cli", "rollout", str(config), "--out", str(folder / "out")]
    environment = environment_of(folder) | {MARK: str(folder), "RAY_TMPDIR": str(place_of(folder))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def place_of(folder: Path) -> Path:
    """Return the folder of Ray's sessions of a run; its name is short, because it holds sockets."""
    place = Path(tempfile.gettempdir()) / f"r{zlib.crc32(str(folder).encode()):x}"
    place.mkdir(exist_ok=True)
    return place


def processes_of(folder: Path) -> dict[int, str]:
    """Return the names of the processes that a run of this folder has left, Ray included, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose processes are ended after the test."""
    yield tmp_path
    for pid in processes_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(place_of(tmp_path), ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_leaves_nothing_of_its_ray(folder: Path) -> None:
    """No process, no folder of a session, and no warning, which Ray would have at the start of every run."""
    out, err = (process := start(folder)).communicate(timeout=600)

    assert 0 == process.returncode, err
    assert "wrote " in out
    assert "warning" not in err.lower()
    assert {} == processes_of(folder)
    assert [] == list(place_of(folder).rglob("session_*"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_ray_starts_is_an_interrupt(folder: Path, sent: signal.Signals) -> None:
    """The exit code is 130 as after Ctrl-C, and no process of Ray is left."""
    process = start(folder)
    wait_until(lambda: "raylet" in processes_of(folder).values(), "Ray does not start")
    process.send_signal(sent)
    _out, err = process.communicate(timeout=600)

    assert 130 == process.returncode, err
    assert "Traceback" not in err
    wait_until(lambda: processes_of(folder) == {}, "processes of Ray are left")
