"""
Random bodies on every route of the gateway's ports: no answer is 5xx, and no traceback is logged.

    pytest plugins/gateway/tests/test_random_bodies.py --hypothesis-profile=long --hypothesis-seed=1 # 60,000 bodies
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from random_bodies import AGENTS, SERVING
from random_requests import Port, Request, build_probe, check_bodies, send
from session_scenarios import Sessions

from turnwise import SamplingParams, Task
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext
from turnwise.errors import DataError
from turnwise.record.spec import EpisodeSpec
from turnwise_gateway.control.control_server import ControlServer
from turnwise_gateway.host import RunningServer
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_gateway.serving.routes import build_serving_app
from turnwise_gateway.serving.served_agent import SERVED_NAME, ServedAgent, ServedConfig
from turnwise_gateway.serving.session_service import SessionService
from turnwise_gateway.session.session import Session
from turnwise_testing.probes.agent import make_task, probe_resources

SECRET = "a secret of the control port"


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


def run_serving(sent: Sequence[Request], _folder: Path) -> Any:
    async def main() -> Any:
        server = RunningServer("m", ServerOptions())
        await server.start()
        service = SessionService(server, capacity=10**6)
        agent = ServedAgent(ServedConfig(), probe_resources(), service)
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
                service.note_result(result)

            episodes: list[asyncio.Task[None]] = []

            def submit(task: Task, number: int) -> None:
                if task.agent_name not in ("", SERVED_NAME):  # as a run does
                    raise DataError(f"the run has no agent {task.agent_name!r}")
                episodes.append(group.create_task(play(task, number)))

            service.submit = submit
            app = build_serving_app(service, SECRET, ServerOptions(), lambda: [make_task()])
            async with ControlServer(app) as control:
                served = await service.request(make_task())
                found = await send(Port(control.url, SECRET, {"session": served.id}), sent)
            for episode in episodes:
                episode.cancel()
        await server.stop()
        return found

    return asyncio.run(main())


PORTS: dict[str, tuple[Callable[[Sequence[Request], Path], Any], dict[str, Any]]] = {
    "agents": (run_agents, AGENTS),
    "serving": (run_serving, SERVING),
}


@pytest.mark.many_cases(1)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # it would hide the failure
@pytest.mark.parametrize("name", PORTS)
def test_no_body_is_an_error_of_the_server(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a client sends, the answer is no 5xx, and nothing is logged as an error."""
    run, routes = PORTS[name]
    check_bodies(run, routes, tmp_path_factory.mktemp(name))
