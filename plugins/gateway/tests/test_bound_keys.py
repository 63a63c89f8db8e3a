"""The key of a program is of use to its processes alone, whichever endpoint they call."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from attrs import frozen
from gateway_rollouts import start_rollout, wait_until, write_rollout

from turnwise import Status
from turnwise.errors import ConfigError
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.programs import callers, processes
from turnwise_gateway.programs.peer_socket import can_find_inodes
from turnwise_gateway.server.gateway_server import FOREIGN_CALLER
from turnwise_result_files import read_results
from turnwise_testing.probes.agent import AgentProbe, Run, make_task, probe_resources

PROGRAMS = Path(__file__).parent / "programs"
OWN = ("own", "child", "grandchild", "child without environment", "orphan", "daemon")
FOREIGN = ("sibling", "child of a sibling with the mark", "stranger")
NUM_TURNS = 2
"""Of the program itself."""
NUM_ENDPOINTS = 6
NUM_SAMPLED = 3

pytestmark = pytest.mark.skipif(not can_find_inodes(), reason="the system does not tell whose a connection is")


@frozen
class Shared:
    """The end of two programs, of which the first has shared its key."""

    victim: Run
    other: Run
    answers: dict[str, tuple[int, Any]]
    logs: list[Any]

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.answers.values()]


def share(folder: Path, caller: str, **options: Any) -> Shared:
    """Run two programs at once, and let a caller use the key of the first."""
    command = (sys.executable, str(PROGRAMS / "share_key.py"), str(folder), caller)
    resources = probe_resources()
    agent = make_external(ExternalConfig(command=command, **options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("Done.",), response_length=4096)

    def call_as_stranger() -> None:
        wait_until((folder / "variables").exists, lambda: "the program has no key")
        subprocess.run([sys.executable, PROGRAMS / "call_all.py", folder], check=True)

    async def main() -> tuple[Run, Run]:
        async with asyncio.TaskGroup() as group:
            first, second = (
                group.create_task(probe.run(make_task(number), agent=agent, limits=probe.limits(max_records=100)))
                for number in range(2)
            )
            if caller == "stranger":
                group.create_task(asyncio.to_thread(call_as_stranger))
            await first
            (folder / "ended").touch()
        return first.result(), second.result()

    with structlog.testing.capture_logs() as logs:
        victim, other = asyncio.run(main())
    answers = json.loads((folder / "answers").read_text())
    assert NUM_ENDPOINTS == len(answers)
    return Shared(victim, other, answers, logs)


def num_turns(run: Run) -> int:
    return sum(len(record.turns()) for record in run.result.trajectories)


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("caller", OWN)
def test_processes_of_the_program_use_its_key(caller: str, tmp_path: Path) -> None:
    """A key is of use to each process of its program, also to those that it has left behind."""
    done = share(tmp_path, caller)

    assert [200] * NUM_ENDPOINTS == done.statuses
    assert Status.COMPLETED is done.victim.result.status
    assert NUM_TURNS + NUM_SAMPLED == num_turns(done.victim)
    assert (1 if caller == "own" else 2) == done.victim.result.metrics.extra["gateway/callers"]
    assert "gateway/foreign_callers" not in done.victim.result.metrics.extra


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("caller", FOREIGN)
def test_a_stolen_key_is_of_no_use(caller: str, tmp_path: Path) -> None:
    """A process of another program is refused with 403 at every endpoint, and the victim's episode is as without it."""
    done = share(tmp_path, caller)

    assert [403] * NUM_ENDPOINTS == done.statuses
    for path, (_, answer) in done.answers.items():
        error = {"type": "permission_error", "message": FOREIGN_CALLER}
        if path.startswith("/v1/messages"):
            assert {"type": "error", "error": error} == answer
        else:
            assert {"error": {**error, "param": None, "code": "foreign_caller"}} == answer
    for run in (done.victim, done.other):
        assert Status.COMPLETED is run.result.status
    assert (NUM_TURNS, 1) == (num_turns(done.victim), num_turns(done.other))
    extra = done.victim.result.metrics.extra
    assert (NUM_TURNS, 1, NUM_ENDPOINTS) == tuple(
        extra[f"gateway/{name}"] for name in ("calls", "callers", "foreign_callers")
    )
    assert not any(name.startswith("gateway/refused") for name in extra)
    assert "gateway/foreign_callers" not in done.other.result.metrics.extra
    (line,) = [each for each in done.logs if each["log_level"] == "warning"]
    assert "none of an agent's program" in line["event"]
    assert json.loads((tmp_path / "variables").read_text())["ANTHROPIC_AUTH_TOKEN"] not in str(done.logs)


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("caller", FOREIGN)
def test_keys_need_not_be_bound(caller: str, tmp_path: Path) -> None:
    """With `bind_keys: false` a key is of use to every process, for programs behind a proxy or in a container."""
    done = share(tmp_path, caller, bind_keys=False)

    assert [200] * NUM_ENDPOINTS == done.statuses
    assert NUM_TURNS + NUM_SAMPLED == num_turns(done.victim)
    assert "gateway/callers" not in done.victim.result.metrics.extra


def test_programs_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The key of a program of another user is not bound, and one warning says so."""

    def refuse(pid: int) -> list[str]:
        raise PermissionError(f"/proc/{pid}/fd")

    monkeypatch.setattr(processes, "_list_files", refuse)
    callers._warn_of_other_users.cache_clear()

    done = share(tmp_path, "stranger")

    assert [200] * NUM_ENDPOINTS == done.statuses
    assert 1 == len([line for line in done.logs if "are not bound" in line["event"]])


def test_a_key_after_the_end_of_its_program(tmp_path: Path) -> None:
    """When its program has ended, a stolen key gets no turn."""
    done = share(tmp_path, "program after the end")

    assert [] == [
        path for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses") if done.answers[path][0] == 200
    ]
    assert 1 == num_turns(done.victim)


@pytest.mark.parametrize("options", [{"function": "gateway_agents:converse"}])
def test_a_key_that_cannot_be_bound(options: dict[str, Any]) -> None:
    """An agent that is no program has no processes that its key could be bound to."""
    with pytest.raises(ConfigError, match="bind_keys"):
        make_external(ExternalConfig(bind_keys=True, **options), probe_resources())


@pytest.mark.slow
def test_a_rollout_binds_the_keys_of_its_programs(tmp_path: Path) -> None:
    """A run of the command line refuses a stolen key, and both of its episodes are complete."""
    (tmp_path / "shared").mkdir()
    command = ["python", str(PROGRAMS / "share_key.py"), str(tmp_path / "shared"), "sibling"]
    write_rollout(tmp_path, 2, {"command": command, "bind_keys": True}, max_in_flight=2)

    with start_rollout(tmp_path, "run.yaml", "--out", "out") as process:
        assert process.wait(600) == 0, (tmp_path / "log").read_text()

    answers = json.loads((tmp_path / "shared" / "answers").read_text())
    assert [403] * NUM_ENDPOINTS == [status for status, _ in answers.values()]
    first, second = sorted(read_results(tmp_path / "out"), key=lambda result: result.uid)
    assert [Status.COMPLETED] * 2 == [first.status, second.status]
    assert NUM_ENDPOINTS == first.metrics.extra["gateway/foreign_callers"]
    assert 1 == (tmp_path / "log").read_text().count("none of an agent's program")
