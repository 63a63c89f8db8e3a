"""An outside agent at the control port, for tests of episodes that agents pull."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from gateway_agents import RefusedError, converse

from turnwise.runtime.service import DriverServices, RemoteServices


@asynccontextmanager
async def serviced(agent: Any) -> AsyncIterator[DriverServices]:
    """Run the service of an agent inside the `async with` statement, as the local runtime does."""
    services = DriverServices({"task_pool": agent.make_service()})
    try:
        await services.open()
        agent.connect(services.client("task_pool"))
        yield services
    finally:
        await services.close()


@asynccontextmanager
async def worker_beside(services: DriverServices, agent: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Connect an agent as one in another process; the end of the task is the death of that process for the driver."""
    worker = RemoteServices()
    serving = asyncio.get_running_loop().create_task(services.serve(worker.fetch, worker.settle))
    serving.add_done_callback(lambda _done: worker.close())  # a dead process waits for nothing
    agent.connect(worker.client("task_pool"))
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.wait([serving])


ANSWER = ("The answer is 42.",)


class Control:
    """The control port as an outside agent sees it."""

    def __init__(self, http: aiohttp.ClientSession, file: Path) -> None:
        self.http, self.file = http, file

    async def post(self, path: str, status: int = 200, **body: object) -> dict[str, Any]:
        return await self._send("POST", path, status, body)

    async def get(self, path: str) -> dict[str, Any]:
        return await self._send("GET", path, 200)

    async def _send(self, method: str, path: str, status: int, body: object = None) -> dict[str, Any]:
        access = json.loads(self.file.read_text())
        headers = {"Authorization": f"Bearer {access['secret']}"}
        async with self.http.request(method, access["url"] + path, json=body, headers=headers) as response:
            assert status == response.status, await response.text()
            return await response.json() if response.status != 204 else {}

    async def lease(self) -> dict[str, Any]:
        """Lease an episode as soon as the port is open."""
        async with asyncio.timeout(30):
            while not self.file.exists():  # noqa: ASYNC110 - the agent and the run know each other by the file alone
                await asyncio.sleep(0.01)
            return await self.post("/tasks/lease", worker="w", wait_s=20)

    async def work(self, leased: dict[str, Any]) -> None:
        """Converse with the model about the task of a lease."""
        await converse(SimpleNamespace(**leased["task"]), SimpleNamespace(**leased["session"]))

    async def end(self, leased: dict[str, Any], how: str = "complete", **body: object) -> dict[str, Any]:
        """Report the end of a lease."""
        return await self.post(f"/leases/{leased['lease']['id']}/{how}", fence=leased["lease"]["fence"], **body)


async def error_of(work: Awaitable[None]) -> str:
    """Return the text of the refusal that ends some work."""
    with pytest.raises(RefusedError) as error:
        await work
    return str(error.value)
