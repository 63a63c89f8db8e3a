"""The end of a run that has started Ray itself, by the command line, when parts of Ray have stopped or died."""

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

from turnwise_result_files import read_results
from turnwise_testing.scripted_run import PLUGIN, environment_of, write_scripted_run

NUM_EPISODES = 4
MARK = "TURNWISE_TEST_RUN"
"""Variable in the environment of every process of a run."""
CODE = """
import os
import signal
from pathlib import Path

from turnwise import Observer


def child_named(name):
    for status in Path("/proc").glob("[0-9]*/stat"):
        fields = status.read_text().rpartition(")")[2].split()
        if fields[1] == str(os.getpid()) and (status.parent / "comm").read_text().strip() == name:
            return int(status.parent.name)


class Disturbs(Observer):
    place = "driver"

    def __init__(self, resources):
        self.num_left = NUM_EPISODES

    def on_episode_finished(self, event):
        self.num_left -= 1
        if not self.num_left:
            os.kill(child_named("NAME"), signal.SENT)
"""

HANGS = """
import time
from pathlib import Path


def hangs(episode):
    (Path(__file__).parent / "hangs").touch()
    time.sleep(600)
"""


def start(folder: Path, code: str = "", **sections: object) -> subprocess.Popen[str]:
    """Start a rollout on a Ray of its own, whose parts may come from some code."""
    (folder / "parts.py").write_text(code, encoding="utf-8")
    config = write_scripted_run(
        folder,
        num_tasks=NUM_EPISODES // 2,
        runtime={"name": "ray", "num_workers": 1, "num_replicas": 1},
        **({"modules": ["./parts.py"], "plugins": [PLUGIN]} | sections),
    )
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
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_run_whose_ray_fails_late_ends_as_it_has_written(folder: Path, name: str, sent: str) -> None:
    """Every episode is written, the exit code is 0, at most one line warns, and no process of the run is left."""
    code = CODE.replace("NAME", name).replace("SENT", sent).replace("NUM_EPISODES", str(NUM_EPISODES))
    process = start(folder, code, observers=["./parts.py:Disturbs"])
    out, err = process.communicate(timeout=600)

    assert 0 == process.returncode, err
    assert "wrote " in out
    assert NUM_EPISODES == len(read_results(folder / "out" / "trajectories.parquet"))
    assert [] == [path.name for path in (folder / "out").glob("running.json*")]
    warnings = [line for line in err.splitlines() if "warning" in line.lower()]
    assert len(warnings) <= 1, err
    assert {} == processes_of(folder)


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


@pytest.mark.ray
@pytest.mark.slow
def test_agents_of_ray_end_after_a_killed_driver(folder: Path) -> None:
    """Nothing of the run is left, also where the driver had no time to end it."""
    process = start(folder, HANGS, reward="./parts.py:hangs", plugins=[PLUGIN, "plain_functions"])
    wait_until(lambda: (folder / "hangs").exists() or process.poll() is not None, "no reward has started", 600)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    wait_until(lambda: processes_of(folder) == {}, "processes of Ray are left")
