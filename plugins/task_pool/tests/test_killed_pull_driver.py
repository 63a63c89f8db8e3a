"""SIGKILL of a driver whose episodes are pulled: `--resume` continues with the same task pool."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_processes import request, run_turnwise
from gateway_rollouts import start_rollout, wait_until, write_rollout

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import read_results
from turnwise_task_pool.pool.sqlite_store import SqliteStore

NUM_TASKS = 12


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """The folder of a run whose twelve tasks wait for agents, with a file for its pool."""
    pull = {"control_file": "control.json", "pool_file": "out/pool.sqlite", "lease_s": 300.0}
    write_rollout(
        tmp_path, NUM_TASKS, {"name": "task_pool", **pull, "keep_requests": "out/requests"}, max_in_flight=NUM_TASKS
    )
    return tmp_path


class Agent:
    """An agent of one driver."""

    def __init__(self, file: Path) -> None:
        self.access = json.loads(file.read_text())

    def post(self, path: str, status: int = 200, **body: object) -> Any:
        return request("POST", self.access["url"] + path, body, self.access["secret"], status)

    def lease(self) -> dict[str, Any]:
        return self.post("/tasks/lease", worker="w", wait_s=30)

    def work(self, leased: dict[str, Any]) -> None:
        session, messages = leased["session"], leased["task"]["messages"]
        body = {"model": session["model"], "messages": messages}
        request("POST", f"{session['openai_base_url']}/chat/completions", body, session["api_key"], 200)

    def complete(self, leased: dict[str, Any], score: float, status: int = 200) -> None:
        lease = leased["lease"]
        self.post(f"/leases/{lease['id']}/complete", status, fence=lease["fence"], score=score)


def read_pool(file: Path, read: Callable[[SqliteStore], Any]) -> Any:
    with SqliteStore.reading(file) as store:
        return read(store)


def number_of(leased: dict[str, Any]) -> int:
    return int(leased["task"]["uid"].partition("-")[2])


def wait_for_control(file: Path, other_than: str = "") -> Agent:
    end = time.monotonic() + 120
    while not file.exists() or file.read_text() == other_than:
        assert time.monotonic() < end, "no control port"
        time.sleep(0.05)
    return Agent(file)


@pytest.mark.slow
def test_a_resumed_run_continues_with_its_pool(pulled: Path) -> None:
    """
    Every episode has one result, also if it was scored before the kill, and fences continue.

    News of the leases that died are late; a report that its agent repeats is still known.
    """
    control, log = pulled / "control.json", (pulled / "log").read_text
    pool, partial = pulled / "out" / "pool.sqlite", pulled / "out" / "trajectories.parquet.partial"
    driver = start_rollout(pulled, "run.yaml", "--out", "out")
    try:
        agent = wait_for_control(control)
        held = [agent.lease() for _ in range(8)]
        for leased in held:
            agent.work(leased)
        done, lost = held[:4], held[4:]
        for leased in done:
            agent.complete(leased, number_of(leased))
        wait_until(lambda: driver.poll() is not None or (partial.exists() and len(read_results(partial)) >= 4), log)
        assert driver.poll() is None, log()
    finally:
        driver.kill()
        driver.wait()
    assert {"done": 4, "leased": 4, "ready": 4, "dead": 0} == read_pool(pool, SqliteStore.count)

    secret = control.read_text()
    resumed = start_rollout(pulled, "--resume", "out")
    try:
        agent = wait_for_control(control, other_than=secret)
        fresh = [agent.lease() for _ in range(8)]
        for leased in lost:
            agent.complete(leased, 99.0, 409)
        for leased in done:
            agent.complete(leased, number_of(leased))  # its first reply may have been lost
            agent.complete(leased, 99.0, 409)
        assert min(each["lease"]["fence"] for each in fresh) > max(each["lease"]["fence"] for each in held)
        assert {number_of(each) for each in fresh} == set(range(NUM_TASKS)) - {number_of(each) for each in done}
        for leased in fresh:
            agent.work(leased)
            agent.complete(leased, number_of(leased))
        assert 0 == resumed.wait(timeout=120), log()
    finally:
        resumed.kill()
        resumed.wait()
    check_results(pulled / "out")
    assert not control.exists()
    replayed = run_turnwise(pulled, "gateway", "replay", pulled / "out", "--json", path="site")
    sessions = json.loads(replayed.stdout)["sessions"]
    assert (0, 4 + 4 + 8) == (replayed.returncode, len(sessions)), replayed.stdout
    assert 4 == sum(not each["is_whole"] for each in sessions)  # those of the kill


def check_results(out: Path) -> None:
    """Check that each task has one result with its own score, in the file of results and in the pool."""
    results = read_results(out)
    assert list(range(NUM_TASKS)) == sorted(result.reward for result in results)
    for result in results:
        assert (Status.COMPLETED, float(result.task.uid.partition("-")[2])) == (result.status, result.reward)
        check_trajectory(result.trajectories[0])
    in_pool = read_pool(out / "pool.sqlite", SqliteStore.results)
    assert NUM_TASKS == len(in_pool) == len({(each.uid, each.global_step, each.rollout_n) for each in in_pool})
    assert list(range(NUM_TASKS)) == sorted(each.score for each in in_pool)


@pytest.mark.slow
def test_two_runs_cannot_share_a_pool_file(pulled: Path) -> None:
    """The second one says so in one line."""
    driver = start_rollout(pulled, "run.yaml", "--out", "out")
    try:
        wait_for_control(pulled / "control.json")
        other = start_rollout(pulled, "run.yaml", "agent.control_file=other.json", "--out", "other")
        assert 2 == other.wait(timeout=120)
        assert "pool.sqlite is in use by another run" in (pulled / "log").read_text()
    finally:
        driver.kill()
        driver.wait()
