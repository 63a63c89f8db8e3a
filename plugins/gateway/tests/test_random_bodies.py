"""
Random bodies on every route of the gateway's ports: no answer is 5xx, and no traceback is logged.

    pytest plugins/gateway/tests/test_random_bodies.py --hypothesis-profile=long --hypothesis-seed=1 # 60,000 bodies
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from random_bodies import AGENTS, PULL, SERVING, requests
from session_scenarios import Sessions
from structlog.testing import capture_logs

from turnwise import SamplingParams, Task
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext
from turnwise.errors import DataError
from turnwise.record.spec import EpisodeSpec
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig, PullOptions
from turnwise_gateway.host import RunningServer
from turnwise_gateway.pool import control
from turnwise_gateway.pool.control_server import ControlServer
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_gateway.serving.desk import ServingDesk
from turnwise_gateway.serving.routes import build_serving_app
from turnwise_gateway.serving.served_agent import SERVED_NAME, ServedAgent, ServedConfig
from turnwise_gateway.session.session import Session
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

NUM_BODIES = 20
"""Bodies of one example."""
SECRET = "a secret of the control port"
Request = tuple[str, bytes]


@frozen
class Port:
    """A port, and the ids that stand in its paths."""

    url: str
    key: str
    names: dict[str, str]


class Errors(logging.Handler):
    """Keeps what the libraries log as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


async def send(port: Port, sent: Sequence[Request]) -> list[tuple[int, Request, str]]:
    """Send requests one after the other, and return those that were answered with 5xx."""
    found = []
    headers = {"Authorization": f"Bearer {port.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for path, body in sent:
            async with client.post(port.url + path.format(**port.names), data=body) as response:
                text = await response.text()
                if response.status >= 500:
                    found.append((response.status, (path, body), text))
    return found


@asynccontextmanager
async def agents_port(session: Session) -> AsyncIterator[Port]:
    directory = SessionDirectory("m")
    key = directory.add("s-1", session)
    async with GatewayServer(directory) as server:
        yield Port(server.url(), key, {})


def run_agents(sent: Sequence[Request], _folder: Path) -> Any:
    async def scenario(session: Session) -> None:
        async with agents_port(session) as port:
            found.extend(await send(port, sent))

    found: list[Any] = []
    limits = {"prompt_length": 4096, "response_length": 4096, "max_records": 10**6}
    Sessions().run(scenario, limits=limits, max_calls=10**6)
    return found


def build_probe(agent: Any) -> AgentProbe:
    resources = probe_resources()
    return AgentProbe(make_agent=lambda: agent, resources=resources, turns=("Done.",), response_length=4096)


def run_pull(sent: Sequence[Request], folder: Path) -> Any:
    async def main() -> Any:
        file = folder / f"{secrets.token_hex(4)}.json"
        config = ExternalConfig(pull=PullOptions(control_file=str(file)))
        agent = make_external(config, probe_resources())
        probe = build_probe(agent)
        async with asyncio.TaskGroup() as group, agent_open(agent) as _address:
            episodes = [
                group.create_task(
                    probe.run(make_task(number), agent=agent, engine=probe.engine(), limits=probe.limits())
                )
                for number in range(2)
            ]
            access = json.loads(file.read_text())
            port = Port(access["url"], access["secret"], {"lease": "1-0-1"})
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {port.key}"}) as client:
                wanted = {"worker": "w", "wait_s": 30}
                # The port answers 204 until an episode has begun.
                while (reply := await client.post(f"{port.url}/tasks/lease", json=wanted)).status == 204:
                    await reply.read()
                leased = await reply.json()
            found = await send(evolve(port, names={"lease": leased["lease"]["id"]}), sent)
            for episode in episodes:
                episode.cancel()
        return found

    return asyncio.run(main())


@asynccontextmanager
async def agent_open(agent: Any) -> AsyncIterator[Any]:
    try:
        yield await agent.open()
    finally:
        await agent.close()


def run_serving(sent: Sequence[Request], _folder: Path) -> Any:
    async def main() -> Any:
        server = RunningServer("m", ServerOptions())
        await server.start()
        desk = ServingDesk(server, capacity=10**6)
        agent = ServedAgent(ServedConfig(), probe_resources(), desk)
        probe = build_probe(agent)
        engine = probe.engine()
        await engine.start()
        async with asyncio.TaskGroup() as group:

            async def play(task: Task, number: int) -> None:
                sampling = SamplingParams(stop_token_ids=probe.chat.stop_token_ids)
                spec = EpisodeSpec(task=task, rollout_n=number, agent_name=SERVED_NAME, sampling=sampling)
                context = EpisodeContext(engine=engine, spawn=group.create_task)
                episode = LiveEpisode(spec=spec, limits=probe.limits(), context=context)
                result = await run_episode(episode, EpisodeProgram(agent=agent))
                desk.note_result(result)

            episodes: list[asyncio.Task[None]] = []

            def submit(task: Task, number: int) -> None:
                if task.agent_name not in ("", SERVED_NAME):  # as a run does
                    raise DataError(f"the run has no agent {task.agent_name!r}")
                episodes.append(group.create_task(play(task, number)))

            desk.submit = submit
            app = build_serving_app(desk, SECRET, ServerOptions(), lambda: [make_task()])
            async with ControlServer(app) as control:
                served = await desk.request(make_task())
                found = await send(Port(control.url, SECRET, {"session": served.names.id}), sent)
            for episode in episodes:
                episode.cancel()
        await server.stop()
        return found

    return asyncio.run(main())


PORTS: dict[str, tuple[Callable[[Sequence[Request], Path], Any], dict[str, Any]]] = {
    "agents": (run_agents, AGENTS),
    "pull": (run_pull, PULL),
    "serving": (run_serving, SERVING),
}


@pytest.mark.many_cases(1)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # it would hide the failure
@pytest.mark.parametrize("name", PORTS)
def test_no_body_is_an_error_of_the_server(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a client sends, the answer is no 5xx, and nothing is logged as an error."""
    monkeypatch.setattr(control, "MAX_WAIT_S", 0.02)  # many bodies wait for a lease, and none becomes free
    run, routes = PORTS[name]
    folder = tmp_path_factory.mktemp(name)

    @given(sent=st.lists(requests(routes), min_size=NUM_BODIES, max_size=NUM_BODIES))
    def check(sent: list[Request]) -> None:
        errors = Errors()
        logging.getLogger().addHandler(errors)
        try:
            with capture_logs() as logs:
                found = run(sent, folder)
        finally:
            logging.getLogger().removeHandler(errors)

        assert found == []
        assert [line for line in logs if line["log_level"] in ("error", "critical")] == []
        assert errors.records == []

    check()
