"""`turnwise train` with agents in other processes that lease episodes, while somebody else scores them."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_site import CONFIG, make_site, start

from turnwise_result_files import read_training_step
from turnwise_task_pool.pool.sqlite_store import SqliteStore

NUM_STEPS, NUM_TASKS, GROUP_SIZE = 3, 3, 3

Name = tuple[str, int, int]
"""Task, training step, and number in the group."""

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in, with agents that pull."""
    make_site(tmp_path)
    config = yaml.safe_load(CONFIG)
    pull = {"control_file": "control.json", "pool_file": "pool.sqlite", "lease_s": 300.0}
    config |= {"agent": {"name": "task_pool", "max_calls": 3, **pull}, "reward": "reported"}
    del config["data"]["validation_path"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


class Crowd:
    """
    Agents that answer and give no score, and a judge that scores their sessions from outside.

    Attributes:
        scores: that the control port accepted, by the id of the lease.
        errors: of the threads.
    """

    def __init__(self, control: Path, count: int) -> None:
        self.scores: dict[str, float] = {}
        self.errors: list[Exception] = []
        self._control, self._over = control, threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._over.is_set():
            try:
                self._solve_one()
            except (OSError, ValueError, KeyError):  # no port: the driver starts, is dead, or has ended
                self._over.wait(0.05)
            except AssertionError as error:
                self.errors.append(error)
                return

    def _solve_one(self) -> None:
        access = json.loads(self._control.read_text())
        status, leased = post(access["url"] + "/tasks/lease", access["secret"], worker="w", wait_s=1)
        if status != 200:
            return
        session, lease = leased["session"], leased["lease"]
        body = {"model": session["model"], "messages": leased["task"]["messages"]}
        status, _reply = post(f"{session['openai_base_url']}/chat/completions", session["api_key"], **body)
        if status != 200:
            return
        score = float(int(lease["id"].encode().hex(), 16) % 5)  # the episodes of a group differ
        url = f"{access['url']}/sessions/{lease['id']}/score"
        status, _ = post(url, access["secret"], id="judge", score=score)
        assert status == 200
        status, _ = post(f"{access['url']}/leases/{lease['id']}/complete", access["secret"], fence=lease["fence"])
        assert status == 200
        self.scores[lease["id"]] = score


def post(url: str, key: str, **body: object) -> tuple[int, Any]:
    """Send a request; return status and JSON of the reply."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, {}


def train(site: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    return start(site, "train", str(site / "config.yaml"), "--out", str(site / "out"), *more, **variables)


def trained_episodes(out: Path) -> dict[Name, float | None]:
    """Return the reward of each episode that a step learnt from."""
    files = sorted(out.glob("episodes/*.parquet"))
    assert len(files) == NUM_STEPS
    episodes = [each.result for file in files for each in read_training_step(file)]
    return {(each.task.uid, each.global_step, each.rollout_n): each.reward for each in episodes}


def scores_in_pool(site: Path) -> dict[Name, float | None]:
    """Return the score of each episode that has ended in the pool."""
    with SqliteStore.reading(site / "pool.sqlite") as pool:
        results = pool.results()
    found = {(json.loads(each.uid)[0], each.global_step, each.rollout_n): each.score for each in results}
    assert len(found) == len(results)
    return found


def check_training(site: Path, crowd: Crowd) -> None:
    """Check that each episode was trained once, with the one score that was accepted for it."""
    assert crowd.errors == []
    trained = trained_episodes(site / "out")
    assert len(trained) == NUM_STEPS * NUM_TASKS * GROUP_SIZE
    assert trained == scores_in_pool(site)
    assert len(set(trained.values())) > 1
    assert set(trained.values()) <= set(crowd.scores.values())


def test_scores_arrive_from_outside(site: Path) -> None:
    """A judge scores the sessions of agents while the trainer waits for them: the rewards are its scores."""
    crowd = Crowd(site / "control.json", 4)
    try:
        process = train(site)
        output = process.communicate()
    finally:
        crowd.stop()

    assert process.returncode == 0, output
    check_training(site, crowd)
    assert len(crowd.scores) == NUM_STEPS * NUM_TASKS * GROUP_SIZE


def test_a_killed_training_continues_with_its_pool(site: Path) -> None:
    """After a SIGKILL in the second step, `--resume` ends the training: no episode is lost, trained or scored twice."""
    crowd = Crowd(site / "control.json", 4)
    try:
        killed = train(site, TURNWISE_TEST_SIGNAL=f"SIGKILL on_turn_finished {NUM_TASKS * GROUP_SIZE + 5}")
        output = killed.communicate()
        assert killed.returncode == -signal.SIGKILL, output
        before = scores_in_pool(site)
        assert {1} < {global_step for _, global_step, _ in before} <= {1, 2}
        resumed = train(site, "--resume")
        output = resumed.communicate()
    finally:
        crowd.stop()

    assert resumed.returncode == 0, output
    check_training(site, crowd)
    kept = {name: score for name, score in scores_in_pool(site).items() if name in before and name[1] == 1}
    assert kept == {name: score for name, score in before.items() if name[1] == 1}
