"""SIGKILL of a driver, which has the gateway in its process: agents die with it, and `--resume` finishes the run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from gateway_rollouts import start_rollout, wait_until, write_rollout

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import read_results

NUM_TASKS = 12
PROGRAM = Path(__file__).parents[1] / "programs" / "linger.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run of twelve tasks: the agents of the first six end, and the others wait in vain."""
    (tmp_path / "hold").touch()
    (tmp_path / "pids").mkdir()
    write_rollout(tmp_path, NUM_TASKS, {"command": ["python", str(PROGRAM), "hold", "pids"]}, max_in_flight=4)
    return tmp_path


def is_alive(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_killed_driver_loses_and_doubles_nothing(folder: Path) -> None:
    """After the resumed run every task has one result; agents of the killed driver have died, and their children."""
    log = (folder / "log").read_text
    partial = folder / "out" / "trajectories.parquet.partial"
    driver = start_rollout(folder, "run.yaml", "--out", "out")
    try:
        wait_until(lambda: driver.poll() is not None or len(list((folder / "pids").iterdir())) >= 8, log)
        wait_until(lambda: driver.poll() is not None or (partial.exists() and len(read_results(partial)) >= 6), log)
        assert driver.poll() is None, log()
    finally:
        driver.kill()
        driver.wait()
    agents = [path.name for path in (folder / "pids").iterdir()]
    wait_until(lambda: not any(map(is_alive, agents)), lambda: f"some of {agents} are alive")
    before = {result.uid: result for result in read_results(partial)}
    assert {Status.COMPLETED} == {result.status for result in before.values()}

    (folder / "hold").unlink()
    resumed = start_rollout(folder, "--resume", "out")
    try:
        assert 0 == resumed.wait(timeout=120), log()
    finally:
        resumed.kill()
        resumed.wait()
    results = read_results(folder / "out")
    assert NUM_TASKS == len(results)
    assert {1} == set(Counter(result.uid for result in results).values())
    for result in results:
        assert (Status.COMPLETED, 1.0) == (result.status, result.reward)
        check_trajectory(result.trajectories[0])
        if result.uid in before:
            kept = before[result.uid].trajectories[0].input_ids
            assert kept.tolist() == result.trajectories[0].input_ids.tolist()


def test_agents_that_close_their_descriptors_die_with_the_driver(tmp_path: Path) -> None:
    """A program without our pipe dies with a killed driver, and so does its child in another session."""
    (tmp_path / "hold").touch()
    (tmp_path / "pids").mkdir()
    command = ["python", str(PROGRAM), "hold", "pids", "detach"]
    write_rollout(tmp_path, 8, {"command": command}, max_in_flight=8)
    log = (tmp_path / "log").read_text
    driver = start_rollout(tmp_path, "run.yaml", "--out", "out")
    try:
        wait_until(lambda: driver.poll() is not None or len(list((tmp_path / "pids").iterdir())) >= 4, log)
        assert driver.poll() is None, log()
    finally:
        driver.kill()
        driver.wait()
    agents = [path.name for path in (tmp_path / "pids").iterdir()]
    try:
        wait_until(lambda: not any(map(is_alive, agents)), lambda: f"some of {agents} are alive")
    finally:
        for pid in filter(is_alive, agents):
            os.kill(int(pid), signal.SIGKILL)
