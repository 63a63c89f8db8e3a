"""Outside agents under Ray: one pool for all workers, and real kills of workers, replicas and agents."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from external_blueprint import AGENTS, ExternalBlueprint
from ray_runs import (
    ON_RAY,
    kill_busy,
    make_manager,
    make_tasks,
    pids,
    wait_for_replacement,
    wait_until,
)

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.service import DriverServices

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
PLAN = RolloutPlan(default_agent="external", agents={"external": None})


@pytest.fixture
def site(tmp_path):
    """A folder for the run and its agents, whose processes end with the test."""

    class Site:
        control, agents = tmp_path / "control.json", []

        def start_agents(self, count):
            for _ in range(count):
                log = tmp_path / f"{len(self.agents)}.log"
                command = [sys.executable, AGENTS / "pull_loop.py", self.control, log]
                self.agents.append(subprocess.Popen(command))

        def manager(self, *, lease_s=5.0, **options):
            pull = {"lease_s": lease_s}
            blueprint = ExternalBlueprint(folder=str(tmp_path), control_file=str(self.control), pull=pull)
            services = DriverServices({"external": blueprint.make_agent().make_service()})
            return make_manager(blueprint, plan=PLAN, services=services, **options)

        def news(self):
            """All that the agents noted."""
            logs = sorted(tmp_path.glob("*.log"))
            return [json.loads(line) for log in logs for line in log.read_text().splitlines()]

    made = Site()
    yield made
    for agent in made.agents:
        agent.kill()
        agent.wait()


def check_scored_once(results, tasks):
    """Check that each task has one result with the score of its own agent, and that all records hold."""
    assert sorted(result.task.uid for result in results) == sorted(task.uid for task in tasks)
    for result in results:
        assert result.status is Status.COMPLETED, result.fault
        assert result.reward == int(result.task.uid.removeprefix("task"))
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        assert result.lineage[-1].trained


def trained_ids(results):
    """Return the ids of the trained records of each task."""
    return {
        result.task.uid: [
            record.input_ids.tolist()
            for record, origin in zip(result.trajectories, result.lineage, strict=True)
            if origin.trained
        ]
        for result in results
    }


def test_sessions_survive_the_death_of_a_replica(site):
    """Calls in flight at a replica that is killed end elsewhere, with the same tokens, and no lease is lost."""
    tasks = make_tasks(12)
    site.start_agents(4)
    with site.manager(workers=2) as manager:
        undisturbed = manager.rollout(tasks)

        runtime, hold = manager.runtime, Path(site.control.parent, "hold")
        hold.touch()
        stream = manager.iterate(tasks)
        taken = []
        collecting = threading.Thread(target=lambda: taken.extend(stream))
        collecting.start()
        kill_busy(runtime.policy.slots[0])
        hold.unlink()
        collecting.join(240)
        stats = manager.stats()

    check_scored_once(taken, tasks)
    assert trained_ids(taken) == trained_ids(undisturbed)
    assert stats["migrations"] > 0
    assert not any("gateway/lost_attempts" in result.metrics.extra for result in taken)
    assert {line["status"] for line in site.news() if "status" in line} == {200}


def test_every_task_is_scored_once_whatever_is_killed(site):
    """A worker, a replica and an agent are killed while all agents wait for the model: each task has one score."""
    tasks = make_tasks(24)
    site.start_agents(5)

    def disturb():
        runtime = manager.runtime
        (replica, worker) = pids(runtime.policy.slots)[0], pids(runtime.workers.slots)[0]
        site.agents[0].kill()
        os.kill(replica, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

    with site.manager(workers=3) as manager:
        stream = manager.iterate(tasks)
        results = [next(stream)]
        disturb()
        results += list(stream)
        stats = manager.stats()

    check_scored_once(results, tasks)
    assert stats["retried"] > 0
    assert stats["worker_restarts"] >= 1
    assert stats["replica_restarts"] >= 1
    assert {line["status"] for line in site.news() if "status" in line} <= {200, 404, 409}
    assert not site.control.exists()


def test_addresses(site):
    """A manager tells the driver's control port and the agents' port of each worker; sessions have the same ones."""
    with site.manager(workers=2, lease_s=300.0) as manager:
        addresses = manager.addresses
        names = [slot.name for slot in manager.runtime.workers.slots]
        assert sorted(addresses) == sorted(["driver", *names])
        assert {"control": json.loads(site.control.read_text())["url"]} == addresses["driver"]
        assert [{"agents"}] * 2 == [set(addresses[name]) for name in names]
        assert 2 == len({addresses[name]["agents"] for name in names})

        tasks = make_tasks(2)
        taken = []
        collecting = threading.Thread(target=lambda: taken.extend(manager.iterate(tasks)))
        collecting.start()
        held = [lease(site.control) for _ in tasks]
        for each in held:
            call_model(each)
            assert 200 == complete(site.control, each, int(each["task"]["uid"].removeprefix("task")))
        collecting.join(120)

        served = {each["session"]["openai_base_url"].partition("/s/")[0] for each in held}
        assert served == {addresses[name]["agents"] for name in names}
        assert addresses == manager.addresses
    check_scored_once(taken, tasks)


def tell(control, path, **body):
    """Send a request to the control port; return status and content of the reply, once there is one."""
    found = []

    def ask():
        try:
            access = json.loads(control.read_text())
            headers = {"Authorization": f"Bearer {access['secret']}"}
            request = urllib.request.Request(access["url"] + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as reply:
                found.append((reply.status, json.loads(reply.read() or b"{}")))
        except urllib.error.HTTPError as error:
            found.append((error.code, {}))
        except (OSError, ValueError):  # the port is not open yet, or this connection was to the worker that died
            return False
        return found[-1][0] not in {204, 429}

    wait_until(ask, f"no reply to {path}")
    return found[-1]


def lease(control):
    return tell(control, "/tasks/lease", worker="w", wait_s=5)[1]


def complete(control, leased, score):
    """Report a score; return the status of the reply."""
    names = leased["lease"]
    return tell(control, f"/leases/{names['id']}/complete", fence=names["fence"], score=score)[0]


def call_model(leased):
    session = leased["session"]
    body = {"model": session["model"], "messages": leased["task"]["messages"]}
    headers = {"Authorization": f"Bearer {session['api_key']}", "Content-Type": "application/json"}
    url = f"{session['openai_base_url']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600) as reply:
        assert reply.status == 200


def port_of(leased):
    return int(leased["session"]["openai_base_url"].split(":")[2].partition("/")[0])


def test_late_news_of_a_dead_worker_change_nothing(site):
    """Its episodes run again under larger fences; scores of the lost leases are refused before and after that."""
    tasks, control = make_tasks(6), site.control
    with site.manager(workers=2, lease_s=300.0) as manager:
        taken = []
        collecting = threading.Thread(target=lambda: taken.extend(manager.iterate(tasks)))
        collecting.start()
        held = [lease(control) for _ in tasks]
        slots = manager.runtime.workers.slots
        victim = psutil.Process(pids(slots)[0])
        ports = {each.laddr.port for each in victim.net_connections() if each.status == psutil.CONN_LISTEN}
        victim.kill()
        lost = [each for each in held if port_of(each) in ports]
        kept = [each for each in held if each not in lost]
        assert len(lost) == len(kept) == 3
        assert {complete(control, each, 99.0) for each in lost} == {409}
        wait_for_replacement(slots, victim.pid)
        again = [lease(control) for _ in lost]
        assert min(each["lease"]["fence"] for each in again) > max(each["lease"]["fence"] for each in held)
        assert {complete(control, each, 99.0) for each in lost} == {409}
        for each in (*kept, *again):
            call_model(each)
            assert complete(control, each, int(each["task"]["uid"].removeprefix("task"))) == 200
        collecting.join(120)

    check_scored_once(taken, tasks)
