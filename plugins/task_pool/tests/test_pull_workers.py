"""Several workers share one control port and one pool in the driver; one of them dies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from attrs import define
from gateway_agents import RefusedError, converse
from pull_control import serviced, worker_beside

from turnwise.runtime.service import DriverServices
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

NEWS = (OSError, aiohttp.ClientError)


@define(eq=False)
class Port:
    """The control port as agents use it: they read its address anew for each request, and ask again without a reply."""

    file: Path
    http: aiohttp.ClientSession

    async def post(self, path: str, **body: object) -> tuple[int, dict[str, Any]]:
        """Return status and content of the reply, once there is one."""
        async with asyncio.timeout(600):
            while True:
                try:
                    access = json.loads(self.file.read_text())
                    headers = {"Authorization": f"Bearer {access['secret']}"}
                    async with self.http.post(access["url"] + path, json=body, headers=headers) as response:
                        if response.status != 429:
                            return response.status, await response.json() if response.status != 204 else {}
                except NEWS:
                    pass
                await asyncio.sleep(0.02)

    async def lease(self) -> dict[str, Any]:
        """Wait for a lease."""
        while True:
            status, leased = await self.post("/tasks/lease", worker="w", wait_s=5)
            if status == 200:
                return leased

    async def work(self, leased: dict[str, Any]) -> None:
        await converse(SimpleNamespace(**leased["task"]), SimpleNamespace(**leased["session"]))

    async def complete(self, leased: dict[str, Any], score: float | None) -> int:
        status, _content = await self.post(
            f"/leases/{leased['lease']['id']}/complete", fence=leased["lease"]["fence"], score=score
        )
        return status

    async def serve(self) -> None:
        """Run episodes until cancelled; the number of a task is its score."""
        while True:
            leased = await self.lease()
            try:
                await self.work(leased)
            except (*NEWS, RefusedError):  # its worker has died
                continue
            await self.complete(leased, number_of(leased))


def number_of(leased: dict[str, Any]) -> int:
    return int(leased["task"]["uid"].partition("-")[2])


@asynccontextmanager
async def port_at(file: Path) -> AsyncIterator[Port]:
    """A client of the control port. It keeps no connection, so the system chooses a worker for each request."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Port(file, http)


@define(eq=False)
class Workers:
    """A driver with a pool, and workers that it knows by their calls alone."""

    file: Path
    services: DriverServices
    engine: Any

    def make_agent(self) -> Any:
        return make_agent(PoolConfig(control_file=self.file), probe_resources())

    async def run(self, numbers: range) -> list[tuple[str, object]]:
        """Run episodes as one worker; return status and score of each."""
        agent = self.make_agent()
        async with worker_beside(self.services, agent), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run_one(agent, number)) for number in numbers]
        return [task.result() for task in tasks]

    async def run_one(self, agent: Any, number: int) -> tuple[str, object]:
        probe = AgentProbe(make_agent=lambda: agent, resources=probe_resources(), response_length=4096)
        done = await probe.run(make_task(number), agent=agent, engine=self.engine)
        return str(done.result.status), done.episode.memory.get("reported_score")


@asynccontextmanager
async def workers_at(file: Path) -> AsyncIterator[Workers]:
    agent = make_agent(PoolConfig(control_file=file), probe_resources())
    engine = AgentProbe(make_agent=lambda: agent, resources=probe_resources(), response_length=4096).engine()
    await engine.start()
    async with serviced(agent) as services:
        yield Workers(file, services, engine)


def test_workers_share_one_control_port(tmp_path: Path) -> None:
    """Agents at one address run the episodes of three workers, each with its own score; nothing is left behind."""
    file, addresses, hosts = tmp_path / "control.json", set(), Counter()

    async def agent(port: Port) -> None:
        while True:
            leased = await port.lease()
            addresses.add(json.loads(file.read_text())["url"])
            hosts[leased["session"]["openai_base_url"].partition("/s/")[0]] += 1
            await port.work(leased)
            assert 200 == await port.complete(leased, number_of(leased))

    async def main() -> list[list[tuple[str, object]]]:
        async with workers_at(file) as workers, port_at(file) as port, asyncio.TaskGroup() as agents:
            working = [agents.create_task(agent(port)) for _ in range(3)]
            async with asyncio.TaskGroup() as group:
                ranges = [range(start, start + 4) for start in (0, 4, 8)]
                running = [group.create_task(workers.run(numbers)) for numbers in ranges]
            for each in working:
                each.cancel()
        return [worker.result() for worker in running]

    done = [each for worker in asyncio.run(main()) for each in worker]

    assert [("completed", float(number)) for number in range(12)] == done
    assert 1 == len(addresses)
    assert [4, 4, 4] == list(hosts.values())  # each in the worker of its episode
    assert [] == list(tmp_path.iterdir())


def test_scores_reach_the_worker_of_their_session(tmp_path: Path) -> None:
    """Scores of turns and renewals of two sessions in two workers, through one port."""
    file = tmp_path / "control.json"

    async def main() -> None:
        async with workers_at(file) as workers, port_at(file) as port, asyncio.TaskGroup() as group:
            running = [group.create_task(workers.run(range(start, start + 1))) for start in (0, 1)]
            for _ in range(2):
                leased = await port.lease()
                await port.work(leased)
                scored = f"/sessions/{leased['lease']['id']}/score"
                for _ in range(8):  # the first of them counts, whichever worker it reaches
                    assert 200 == (await port.post(scored, id="a", score=0.5, turn=0))[0]
                    assert 409 == (await port.post(scored, id="b", score=0.5, turn=0))[0]
                heartbeat = f"/leases/{leased['lease']['id']}/heartbeat"
                assert {200} == {(await port.post(heartbeat, fence=leased["lease"]["fence"]))[0] for _ in range(8)}
                assert (
                    200
                    == (await port.post(f"/leases/{leased['lease']['id']}/complete", fence=leased["lease"]["fence"]))[0]
                )
        assert {"completed"} == {status for worker in running for status, _score in worker.result()}
        scores = [score for worker in running for _status, score in worker.result()]
        assert [0.5, 0.5] == [score["turns"][0] for score in scores]

    asyncio.run(main())


def test_the_death_of_a_worker(tmp_path: Path) -> None:
    """Its leases end with it; its episode runs again elsewhere under a larger fence, and only that one counts."""
    file = tmp_path / "control.json"

    async def main() -> None:
        async with workers_at(file) as workers, port_at(file) as port, asyncio.TaskGroup() as group:
            agent = workers.make_agent()
            async with worker_beside(workers.services, agent) as dying:
                lost = group.create_task(workers.run_one(agent, 1))
                leased = await port.lease()
                await port.work(leased)
                dying.cancel()
                await asyncio.wait([dying])
                assert 409 == await port.complete(leased, 9.0)
                again = group.create_task(workers.run(range(1, 2)))
                fresh = await port.lease()
                assert fresh["lease"]["fence"] > leased["lease"]["fence"]
                assert 409 == await port.complete(leased, 9.0)
                await port.work(fresh)
                assert 200 == await port.complete(fresh, 1.0)
                assert [("completed", 1.0)] == await again
                lost.cancel()

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())
