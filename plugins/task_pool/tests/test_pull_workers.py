"""Several workers share one control address and one pool; some of them, or of their agents, are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from attrs import define
from gateway_agents import RefusedError, converse

from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.shared_pool import SharedStore
from turnwise_task_pool.store import PoolTask
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

WORKER = Path(__file__).parent / "programs" / "pull_worker.py"
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


async def run_in_process(file: Path, numbers: range) -> list[tuple[str, object]]:
    """Run episodes as one worker, with its pool's end of the shared port; return status and score of each."""
    config = PoolConfig(control_file=str(file))
    resources = probe_resources()
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, response_length=4096)
    agent, engine = probe.make_agent(), probe.engine()
    await engine.start()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.run(make_task(number), agent=agent, engine=engine)) for number in numbers]
    done = [task.result() for task in tasks]
    return [(str(each.result.status), each.episode.memory.get("reported_score")) for each in done]


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
        async with port_at(file) as port, asyncio.TaskGroup() as agents:
            working = [agents.create_task(agent(port)) for _ in range(3)]
            async with asyncio.TaskGroup() as group:
                ranges = [range(start, start + 4) for start in (0, 4, 8)]
                workers = [group.create_task(run_in_process(file, numbers)) for numbers in ranges]
            for each in working:
                each.cancel()
        return [worker.result() for worker in workers]

    done = [each for worker in asyncio.run(main()) for each in worker]

    assert [("completed", float(number)) for number in range(12)] == done
    assert 1 == len(addresses)
    assert [4, 4, 4] == list(hosts.values())  # each in the worker of its episode
    assert [] == list(tmp_path.iterdir())


def test_groups_of_two_workers_are_handed_out_together(tmp_path: Path) -> None:
    """The members of a group come one after the other, whichever worker runs them, and whichever hands them out."""
    stores: list[SharedStore] = []
    for runner in ("one", "two"):
        stores.append(SharedStore(tmp_path / "pool.sqlite", runner=runner, peers=lambda: ("one", "two")))
    for rollout_n in range(4):  # those with odd numbers are the second worker's, which takes the tasks in another order
        for uid in "cba" if rollout_n % 2 else "abc":
            stores[rollout_n % 2].put(PoolTask(uid=uid, rollouts=(rollout_n,)), capacity=12)

    leases = [stores[number % 2].lease("w", now=0.0, lease_s=9.0) for number in range(12)]

    assert [(uid, number) for uid in "abc" for number in range(4)] == [(each.uid, each.rollout_n) for each in leases]
    assert list(range(1, 13)) == [each.fence for each in leases]
    assert [("one", "two")[each.rollout_n % 2] for each in leases] == [stores[0].runner_of(each.id) for each in leases]
    for store in stores:
        store.close()


def test_a_score_may_reach_any_worker(tmp_path: Path) -> None:
    """Scores of turns, late ones and transcripts are answered alike by every worker."""
    file = tmp_path / "control.json"

    async def main() -> None:
        async with port_at(file) as port, asyncio.TaskGroup() as group:
            workers = [group.create_task(run_in_process(file, range(start, start + 1))) for start in (0, 1)]
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
        assert {"completed"} == {status for worker in workers for status, _score in worker.result()}
        scores = [score for worker in workers for _status, score in worker.result()]
        assert [0.5, 0.5] == [score["turns"][0] for score in scores]

    asyncio.run(main())


# Workers in processes, which are killed


@pytest.fixture
def start_worker(tmp_path: Path) -> Any:
    """Starts workers in processes, and kills them after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(first: int, count: int, **options: object) -> subprocess.Popen[str]:
        arguments = [str(tmp_path / "control.json"), str(first), str(count), json.dumps(options)]
        started.append(subprocess.Popen([sys.executable, WORKER, *arguments], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def results_of(worker: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Wait for the end of a worker, and return its results by the uid of their tasks."""
    output, _ = worker.communicate(timeout=120)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # the log too
    assert len(lines) == len({line["uid"] for line in lines})
    return {line["uid"].partition("/")[0]: line for line in lines}


@pytest.mark.slow
def test_a_killed_worker(tmp_path: Path, start_worker: Callable[..., Any]) -> None:
    """
    SIGKILL of a worker whose episodes are leased: news of its leases are late, and change nothing.

    Its episodes run again in another worker, with other leases, larger fences and new sessions; the other worker's
    sessions never notice.
    """
    file = tmp_path / "control.json"

    async def main() -> None:
        doomed, other = start_worker(0, 3), start_worker(10, 3)
        async with port_at(file) as port:
            held = [await port.lease() for _ in range(6)]
            lost = [leased for leased in held if number_of(leased) < 10]
            kept = [leased for leased in held if number_of(leased) >= 10]
            assert 3 == len(lost) == len(kept)
            for leased in held:
                await port.work(leased)
            os.kill(doomed.pid, signal.SIGKILL)
            doomed.wait()
            again = start_worker(0, 3)
            for leased in lost:
                assert 409 == await port.complete(leased, 9.0)
                with pytest.raises(NEWS):
                    await port.work(leased)
            fresh = [await port.lease() for _ in range(3)]
            assert min(each["lease"]["fence"] for each in fresh) > max(each["lease"]["fence"] for each in held)
            assert not {each["lease"]["id"] for each in fresh} & {each["lease"]["id"] for each in held}
            for leased in fresh:
                await port.work(leased)
            for leased in lost:
                assert 409 == await port.complete(leased, 9.0)
            for leased in (*kept, *fresh):
                assert 200 == await port.complete(leased, number_of(leased))
            done = await asyncio.to_thread(lambda: results_of(other) | results_of(again))
            assert [0, 1, 2, 10, 11, 12] == sorted(each["score"] for each in done.values())
            assert {"completed"} == {each["status"] for each in done.values()}

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_workers_are_killed_and_start_anew(tmp_path: Path, start_worker: Callable[..., Any]) -> None:
    """SIGKILL of every worker leaves files, which the next run replaces; late news get no 200."""
    file = tmp_path / "control.json"

    async def main() -> None:
        first = [start_worker(0, 2), start_worker(2, 2)]
        async with port_at(file) as port:
            held = [await port.lease() for _ in range(4)]
            for worker in first:
                worker.kill()
                worker.wait()
            secret = file.read_text()
            second = start_worker(0, 4)
            while file.read_text() == secret:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
            for leased in held:
                assert await port.complete(leased, 9.0) in {404, 409}
            async with asyncio.TaskGroup() as agents:
                serving = agents.create_task(port.serve())
                done = await asyncio.to_thread(results_of, second)
                serving.cancel()
            assert [0, 1, 2, 3] == sorted(each["score"] for each in done.values())

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())
