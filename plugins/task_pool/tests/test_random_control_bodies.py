"""Random bodies at the control port of a pool."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import evolve
from pull_control import serviced
from random_bodies import PULL
from random_requests import Port, Request, build_probe, check_bodies, send

from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.driver import control
from turnwise_testing.probes.agent import make_task, probe_resources


def run_pull(sent: Sequence[Request], folder: Path) -> Any:
    async def main() -> Any:
        file = folder / f"{secrets.token_hex(4)}.json"
        config = PoolConfig(control_file=str(file))
        agent = make_agent(config, probe_resources())
        probe = build_probe(agent)
        async with serviced(agent), asyncio.TaskGroup() as group, agent_open(agent) as _address:
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


@pytest.mark.many_cases(1)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # it would hide the failure
def test_no_body_is_an_error_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a client sends, the answer is no 5xx, and nothing is logged as an error."""
    monkeypatch.setattr(control, "MAX_WAIT_S", 0.02)  # many bodies wait for a lease, and none becomes free
    check_bodies(run_pull, PULL, tmp_path)
