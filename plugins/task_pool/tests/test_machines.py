"""`turnwise rollout` on two machines: one pool in the driver serves the workers and the agents of both."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_rollouts import start_rollout, wait_until, write_rollout
from machines import Machine, short_folder, two_machines

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import read_results
from turnwise_task_pool.pool.sqlite_store import SqliteStore

pytestmark = [pytest.mark.slow, pytest.mark.ray]
NUM_TASKS = 40
FREE = 5
"""Leases of each agent before the one that it keeps until the machine is lost: together more than a worker's share."""
PORT = 6399
AGENT = Path(__file__).parent / "programs" / "pull_loop.py"
PLUGINS = "plugins=[acme_one_reply,chat_templates,gateway,reported_reward,routers,task_pool]"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a node of Ray each, and the files of a run."""
    agent = {"name": "task_pool", "control_file": "control.json", "pool_file": "out/pool.sqlite", "lease_s": 10.0}
    write_rollout(tmp_path, NUM_TASKS, agent, max_in_flight=NUM_TASKS)
    paths = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of the nodes and of the driver
    environment = os.environ | {"PYTHONPATH": paths}
    with short_folder() as folder, two_machines(environment) as (first, second):
        first.start_ray("--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", str(folder))
        wait_until(lambda: first.count_nodes(f"{first.host}:{PORT}") == 1, lambda: "Ray does not start")
        second.start_ray("--address", f"{first.host}:{PORT}")
        wait_until(lambda: first.count_nodes(f"{first.host}:{PORT}") == 2, lambda: "the second node does not join")
        yield first, second


def overrides(first: Machine) -> list[str]:
    """Return the options of a run on both machines, with two workers on each."""
    ray = f"address: '{first.host}:{PORT}', trusted_network: true, heartbeat_s: 0.5, heartbeat_timeout_s: 20"
    rest = "max_restarts: 20, start_timeout_s: 120, backoff_s: 0.2, window: 6"
    return [PLUGINS, f"runtime={{name: ray, num_workers: 4, num_replicas: 2, ray: {{{ray}, {rest}}}}}"]


def hosts_of(logs: list[Path]) -> Counter[str]:
    """Return the number of leases by the address of the worker that ran them."""
    texts = [log.read_text() for log in logs if log.exists()]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
    return Counter(line["url"].split("/")[2].partition(":")[0] for line in lines if "url" in line)


def test_a_machine_is_lost(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Its workers and agents are gone in mid-run; each episode ends once, with the score of its own agent."""
    first, second = machines
    go = tmp_path / "go"
    out, logs = tmp_path / "out", [tmp_path / f"agent{number}.log" for number in range(4)]
    text = (tmp_path / "log").read_text
    lengths = ["rollout.prompt_length=4096", "rollout.response_length=4096"]  # the agents have tools
    arguments = [*overrides(first), *lengths, "agent.allow_remote=true", "--out", "out"]
    driver = start_rollout(tmp_path, "run.yaml", *arguments, before=first.before)
    try:
        wait_until(lambda: driver.poll() is not None or (tmp_path / "control.json").exists(), text)
        for number, log in enumerate(logs):
            machines[number % 2].start(sys.executable, AGENT, tmp_path / "control.json", log, FREE, go)
        wait_until(lambda: driver.poll() is not None or hosts_of(logs).total() == len(logs) * (FREE + 1), text)
        assert driver.poll() is None, text()
        assert set(hosts_of(logs)) == {first.host, second.host}
        second.kill()  # each agent has a lease now, and half of the agents are on this machine
        go.touch()
        assert driver.wait(timeout=240) == 0, text()
    finally:
        driver.kill()
        driver.wait()
    counts = next(json.loads(line) for line in text().splitlines() if '"event": "episodes in all"' in line)
    assert counts["retried"] > 0
    results = read_results(out)
    assert sorted(result.task.uid for result in results) == sorted(f"task-{number}" for number in range(NUM_TASKS))
    for result in results:
        assert (Status.COMPLETED, float(result.task.uid.partition("-")[2])) == (result.status, result.reward)
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
    with SqliteStore.reading(out / "pool.sqlite") as pool:
        in_pool = pool.results()
    assert Counter(each.uid for each in in_pool).most_common(1)[0][1] == 1
    assert sorted(each.score for each in in_pool if str(each.state) == "done") == list(range(NUM_TASKS))
    assert not (tmp_path / "control.json").exists()


def test_loopback_ports_on_two_machines_are_refused(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """A line that names the option, and exit code 2."""
    first, second = machines
    with start_rollout(tmp_path, "run.yaml", *overrides(first), "--out", "out", before=first.before) as driver:
        code = driver.wait(timeout=240)
    text = (tmp_path / "log").read_text()
    assert code == 2, text
    assert f"agent.allow_remote: a worker runs on {second.host}, and the control port is on {first.host}" in text
    assert "Traceback" not in text
