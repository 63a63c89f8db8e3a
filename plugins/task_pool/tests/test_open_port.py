"""The ports of outside agents are open from the start of a run to its end, also between its calls."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from turnwise import EpisodeResult, RolloutManager, Status
from turnwise.episode.driver import EpisodeProgram
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.service import DriverServices
from turnwise.runtime.worker import WorkerComponents
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.replay.request_file import RequestLog
from turnwise_reported_reward import ReportedReward
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.workers import worker
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat, probe_resources

PLAN = RolloutPlan(default_agent="external", agents={"external": None})


@contextmanager
def run_manager(config: PoolConfig | ExternalConfig, plan: RolloutPlan = PLAN) -> Iterator[RolloutManager]:
    """A running manager whose agent is an outside one."""
    resources = probe_resources()
    make = make_agent if isinstance(config, PoolConfig) else make_external
    agent = make(config, resources)
    probe = AgentProbe(
        make_agent=lambda: agent, resources=resources, turns=("The answer is 42.",), response_length=4096
    )
    parts = WorkerComponents(
        engine=probe.engine(),
        programs={"external": EpisodeProgram(agent=agent, reward=ReportedReward())},
        limits=probe.limits(),
        stop_token_ids=probe_chat().stop_token_ids,
        default_agent="external",
    )
    services = DriverServices({"external": agent.make_service()} if isinstance(config, PoolConfig) else {})
    with RolloutManager(LocalRuntime(parts.engine, parts, services=services), plan) as manager:
        yield manager


class Control:
    """The control port of a run."""

    def __init__(self, file: Path) -> None:
        self.access = json.loads(file.read_text())

    def post(self, path: str, **body: object) -> tuple[int, dict[str, Any]]:
        """Return status and content of a reply."""
        return post(self.access["url"] + path, self.access["secret"], body)

    def count_waiting(self) -> int:
        """Return the number of agents that wait for a lease."""
        headers = {"Authorization": f"Bearer {self.access['secret']}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.access['url']}/tasks", headers=headers)) as reply:
            return json.loads(reply.read())["stats"]["waiting"]

    def lease(self) -> dict[str, Any]:
        return self.post("/tasks/lease", worker="w", wait_s=30)[1]

    def complete(self, leased: dict[str, Any], score: float) -> tuple[int, dict[str, Any]]:
        lease = leased["lease"]
        return self.post(f"/leases/{lease['id']}/complete", fence=lease["fence"], score=score)


def post(url: str, key: str, body: object) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def call_model(leased: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    session = leased["session"]
    body = {"model": session["model"], "messages": leased["task"]["messages"]}
    return post(f"{session['openai_base_url']}/chat/completions", session["api_key"], body)


def run_one(manager: RolloutManager, control: Control, number: int) -> tuple[dict[str, Any], EpisodeResult]:
    """Run an episode whose agent gets 0.5; return its lease and its result."""
    results: list[EpisodeResult] = []
    calling = threading.Thread(target=lambda: results.extend(manager.rollout([make_task(number)], global_step=number)))
    calling.start()
    leased = control.lease()
    assert 200 == call_model(leased)[0]
    assert 200 == control.complete(leased, 0.5)[0]
    calling.join()
    return leased, results[0]


def test_news_between_two_steps_are_answered(tmp_path: Path) -> None:
    """A repeated report is accepted; another score, or one for an ended session, is refused with the reason."""
    file = tmp_path / "control.json"
    with run_manager(PoolConfig(control_file=file)) as manager:
        control = Control(file)  # before the first episode
        leased, result = run_one(manager, control, 0)
        assert (Status.COMPLETED, 0.5) == (result.status, result.reward)
        name = leased["lease"]["id"]

        assert (200, {"verdict": "repeated"}) == control.complete(leased, 0.5)
        assert (409, "conflict") == code_of(control.complete(leased, 0.75))
        status, content = control.post(f"/sessions/{name}/score", id="late", score=1.0)
        assert (409, "the session has ended") == (status, content["error"]["message"])
        assert (409, "late") == code_of(control.post(f"/leases/{name}/heartbeat", fence=leased["lease"]["fence"]))
        assert (404, "unknown") == code_of(control.post("/sessions/9-9-9/score", id="a", score=1.0))
        status, content = call_model(leased)
        assert (400, "session_closed") == (status, content["error"]["code"])

        again, result = run_one(manager, control, 1)  # at the same address
        assert (Status.COMPLETED, 0.5) == (result.status, result.reward)
        assert again["lease"]["fence"] > leased["lease"]["fence"]
    assert not file.exists()


def code_of(reply: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return reply[0], reply[1]["error"]["code"]


def test_a_session_that_is_no_longer_shown_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score for it is refused like one for a session that has just ended."""
    monkeypatch.setattr(worker, "MAX_ENDED", 0)
    file = tmp_path / "control.json"
    with run_manager(PoolConfig(control_file=file)) as manager:
        control = Control(file)
        leased, _result = run_one(manager, control, 0)
        run_one(manager, control, 1)  # its lease removes the session before

        reply = control.post(f"/sessions/{leased['lease']['id']}/score", id="late", score=1.0)
        assert (409, "late") == code_of(reply)


def test_an_agent_that_waits_between_two_steps_gets_the_next_episode(tmp_path: Path) -> None:
    """It need not ask again, although no episode ran when it asked."""
    file = tmp_path / "control.json"
    with run_manager(PoolConfig(control_file=file)) as manager:
        control = Control(file)
        leases: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: leases.append(control.lease()))
        waiting.start()
        collecting = threading.Thread(target=lambda: manager.rollout([make_task(3)]))
        collecting.start()
        waiting.join()
        assert "probe-3" == leases[0]["task"]["uid"]
        call_model(leases[0])
        assert 200 == control.complete(leases[0], 1.0)[0]
        collecting.join()


def test_waiting_agents_get_a_reply_when_the_run_ends(tmp_path: Path) -> None:
    """204 and not a broken connection."""
    file, replies = tmp_path / "control.json", []
    with run_manager(PoolConfig(control_file=file)) as manager:
        control = Control(file)
        run_one(manager, control, 0)
        waiting = threading.Thread(target=lambda: replies.append(control.post("/tasks/lease", worker="w", wait_s=50)))
        waiting.start()
        while not control.count_waiting():
            time.sleep(0.01)
    waiting.join()
    assert replies == [(204, {})]


def test_groups_of_a_run_are_handed_out_together(tmp_path: Path) -> None:
    """Agents get all rollouts of a task before those of the next one, and each rollout keeps its score."""
    file = tmp_path / "control.json"
    with run_manager(PoolConfig(control_file=file), evolve(PLAN, n=3)) as manager:
        control = Control(file)
        results: list[EpisodeResult] = []
        collecting = threading.Thread(target=lambda: results.extend(manager.rollout([make_task(n) for n in range(4)])))
        collecting.start()
        held = [control.lease() for _ in range(12)]
        for leased in reversed(held):
            assert 200 == call_model(leased)[0]
            assert 200 == control.complete(leased, leased["lease"]["fence"])[0]
        collecting.join()

    order = [(each["task"]["uid"], each["task"]["rollout_n"]) for each in held]
    assert [(f"probe-{task}", rollout_n) for task in range(4) for rollout_n in range(3)] == order
    scores = {(result.task.uid, result.rollout_n): result.reward for result in results}
    fences = [each["lease"]["fence"] for each in held]
    assert dict(zip(order, map(float, fences), strict=True)) == scores


def test_addresses(tmp_path: Path) -> None:
    """A manager tells the addresses of both ports, and they stay the same."""
    file = tmp_path / "control.json"
    with run_manager(PoolConfig(control_file=file)) as manager:
        addresses = manager.addresses
        assert {"local"} == set(addresses)
        assert Control(file).access["url"] == addresses["local"]["control"]
        leased, _result = run_one(manager, Control(file), 0)
        assert leased["session"]["openai_base_url"].startswith(addresses["local"]["agents"] + "/s/")
        assert addresses == manager.addresses


def test_the_address_of_functions(tmp_path: Path) -> None:
    """An agent in the worker's process has a port for the model alone; keys of sessions open it."""
    with run_manager(ExternalConfig(function="gateway_agents:converse", keep_requests=tmp_path)) as manager:
        (addresses,) = manager.addresses.values()
        assert {"agents"} == set(addresses)
        assert 401 == post(f"{addresses['agents']}/v1/chat/completions", "no key", {})[0]
        (result,) = manager.rollout([make_task(0)])
        assert Status.COMPLETED is result.status
        (requests,) = tmp_path.glob("*.jsonl")
        events = [json.loads(line).get("event") for line in requests.read_text().splitlines()]
        assert [None, "call", "answer", "delivered", "end"] == events


def test_an_episode_whose_requests_cannot_be_kept_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of the file is as necessary as the others: a replay would have nothing to compare with."""

    def fail(_self: RequestLog, *, is_trained: bool) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(RequestLog, "on_close", fail)
    with run_manager(ExternalConfig(function="gateway_agents:converse", keep_requests=tmp_path)) as manager:
        (result,) = manager.rollout([make_task(0)])

    assert Status.FAILED is result.status
    assert result.fault is not None
    assert "the disk is full" in result.fault.message
