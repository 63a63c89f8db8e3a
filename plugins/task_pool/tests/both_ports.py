"""The control ports of `gateway serve` and of a pool, each with episodes of the same scripted model."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from attrs import define, field
from pull_control import serviced

from turnwise import SamplingParams, Task
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext
from turnwise.record.spec import EpisodeSpec
from turnwise_gateway.control.control_server import ControlServer
from turnwise_gateway.host import RunningServer
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.routes import build_serving_app
from turnwise_gateway.serving.served_agent import SERVED_NAME, ServedAgent, ServedConfig
from turnwise_gateway.serving.session_service import SessionService
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

SECRET = "a secret of the control port"


@define(eq=False)
class SessionPort:
    """
    A control port.

    Attributes:
        url: of the port.
        secret: of the port.
        start: starts the episode of the task with a number, and asks the port for its session.
        opened: the sessions.
    """

    url: str
    secret: str
    http: aiohttp.ClientSession
    start: Callable[[SessionPort, int], Any]
    opened: list[dict[str, Any]] = field(factory=list)

    async def open(self, num_turns: int) -> dict[str, Any]:
        """Open a session, and call the model in it; the ids of its turns are under `turns`."""
        session = await self.start(self, len(self.opened))
        self.opened.append(session)
        messages, session["turns"] = [{"role": "user", "content": "Hello?"}], []
        for _ in range(num_turns):
            url, body = f"{session['openai_base_url']}/chat/completions", {"model": "policy", "messages": messages}
            reply = await (await self.http.post(url, json=body, headers=bearer(session["api_key"]))).json()
            session["turns"].append(reply["id"])
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        return session

    async def post(self, path: str, body: object) -> dict[str, Any]:
        reply = await self.http.post(self.url + path, json=body, headers=bearer(self.secret))
        assert reply.status == 200, await reply.text()
        found: dict[str, Any] = await reply.json()
        return found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@define(eq=False)
class _Episodes:
    """Runs episodes of an agent, and tells their results."""

    agent: Any
    note: Callable[[Any], object]
    probe: AgentProbe
    engine: Any
    group: asyncio.TaskGroup
    running: list[asyncio.Task[None]] = field(factory=list)

    def submit(self, task: Task, number: int) -> None:
        self.running.append(self.group.create_task(self._play(task, number)))

    async def _play(self, task: Task, number: int) -> None:
        sampling = SamplingParams(stop_token_ids=self.probe.chat.stop_token_ids)
        spec = EpisodeSpec(task=task, rollout_n=number, agent_name=SERVED_NAME, sampling=sampling)
        context = EpisodeContext(engine=self.engine, spawn=self.group.create_task)
        episode = LiveEpisode(spec=spec, limits=self.probe.limits(), context=context)
        self.note(await run_episode(episode, EpisodeProgram(agent=self.agent)))


@asynccontextmanager
async def _episodes(agent: Any, note: Callable[[Any], object]) -> AsyncIterator[_Episodes]:
    resources = probe_resources()
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("Done.",), response_length=4096)
    engine = probe.engine()
    await engine.start()
    async with asyncio.TaskGroup() as group:
        episodes = _Episodes(agent, note, probe, engine, group)
        try:
            yield episodes
        finally:
            for each in episodes.running:
                each.cancel()


@asynccontextmanager
async def served_port(_folder: Path) -> AsyncIterator[SessionPort]:
    """The control port of `turnwise gateway serve`."""
    server = RunningServer("policy", ServerOptions())
    await server.start()
    service = SessionService(server, capacity=10**6)
    agent = ServedAgent(ServedConfig(), probe_resources(), service)
    app = build_serving_app(service, SECRET, ServerOptions(), lambda: [make_task(number) for number in range(99)])

    async def start(port: SessionPort, number: int) -> Any:
        return (await port.post("/sessions", {"uid": f"probe-{number}"}))["session"]

    async with (
        _episodes(agent, service.note_result) as episodes,
        ControlServer(app) as control,
        aiohttp.ClientSession() as http,
    ):
        service.submit = episodes.submit
        yield SessionPort(control.url, SECRET, http, start)
    await server.stop()


@asynccontextmanager
async def pool_port(folder: Path) -> AsyncIterator[SessionPort]:
    """The control port of a pool."""
    file = folder / f"{secrets.token_hex(4)}.json"
    agent = make_agent(PoolConfig(control_file=str(file), max_attempts=1), probe_resources())
    async with serviced(agent), aiohttp.ClientSession() as http:
        await agent.open()
        access = json.loads(file.read_text())
        async with _episodes(agent, lambda _result: None) as episodes:

            async def start(port: SessionPort, number: int) -> Any:
                episodes.submit(make_task(number), 0)
                return (await port.post("/tasks/lease", {"worker": "w", "wait_s": 30}))["session"]

            yield SessionPort(access["url"], access["secret"], http, start)
        await agent.close()


PORTS: dict[str, Callable[[Path], AbstractAsyncContextManager[SessionPort]]] = {
    "served": served_port,
    "pool": pool_port,
}
