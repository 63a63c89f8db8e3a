"""The pool of a run and its control port, in the driver: a service that the agents in all workers call."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from attrs import asdict, define, field
from yarl import URL

from turnwise.errors import ConfigError, DataError, InfrastructureError
from turnwise.types import JsonObject
from turnwise_gateway.control.announcement import announced
from turnwise_gateway.control.control_server import ControlServer
from turnwise_gateway.server.options import ServerOptions
from turnwise_task_pool.config import LOOPBACK, PoolConfig
from turnwise_task_pool.driver.control import build_pool_app
from turnwise_task_pool.driver.offer_store import OfferStore
from turnwise_task_pool.driver.offers import Offers
from turnwise_task_pool.pool.locks import only_user
from turnwise_task_pool.pool.store import Lease
from turnwise_task_pool.pool.task_pool import TaskPool

_REACH_S: Final = 10.0
"""Seconds for the driver to connect to the agents' port of a worker."""


@define(eq=False)
class PoolService:
    """
    The pool, which keeps its state in a file, and the only control port of a run.

    Attributes:
        config: of the agent.
    """

    config: PoolConfig
    _pool: TaskPool = field(init=False)
    _offers: Offers = field(init=False)
    _parts: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    async def open(self, host: str) -> Mapping[str, str]:
        """Open the pool and the control port; errors as for `OfferStore` and `only_user`."""
        config, file = self.config, self.config.control_file.absolute()
        self._parts.enter_context(only_user(file, "agent.control_file"))
        self._pool = TaskPool(store=self._open_store(), capacity=config.capacity, lease_s=config.lease_s)
        self._offers = Offers(self._pool)
        self._pool.on_lost = self._offers.lose
        await self._parts.enter_async_context(self._pool)
        secret = os.environ.get(config.secret_variable) or secrets.token_urlsafe(32)
        options = ServerOptions(port=config.control_port)
        if config.allow_remote:
            options = ServerOptions(host=config.listen_at(host), port=config.control_port, allow_remote=True)
        app = build_pool_app(self._pool, self._offers, secret, options)
        try:
            control = await self._parts.enter_async_context(ControlServer(app, options))
        except OSError as error:
            raise InfrastructureError(f"the control port cannot be opened: {error}") from error
        # Runs behind the removal of the file and before the server stops: waiting agents get a reply.
        self._parts.callback(self._pool.send_away)
        self._parts.enter_context(announced(file, {"url": control.url, "secret": secret}))
        return {"control": control.url}

    async def call(self, method: str, arguments: JsonObject) -> object:
        """Answer a worker; the private methods document the calls."""
        calls: Any = {
            "join": self._join,
            "attend": self._offers.attend,
            "exchange": self._offers.exchange,
            "offer": self._offers.put,
            "withdraw": self._offers.withdraw,
            "renew": self._pool.heartbeat,
            "result": self._result,
        }
        answer: object = await calls[method](**arguments)
        return answer

    async def close(self) -> None:
        await self._parts.aclose()

    async def _join(self, worker: str, url: str) -> None:
        """Add a worker; `InfrastructureError` if this machine cannot reach the port of its agents."""
        at = URL(url)
        try:
            if at.host != LOOPBACK:  # of the worker's own machine, which is this one
                async with asyncio.timeout(_REACH_S):
                    _reader, writer = await asyncio.open_connection(at.host, at.port)
                writer.close()
        except (OSError, TimeoutError) as error:
            text = f"the driver cannot reach the agents' port of a worker at {url}: {error or 'it does not answer'}"
            raise InfrastructureError(f"{text}; agents could not either: open it in the network") from error
        self._offers.join(worker)

    async def _result(self, lease: Mapping[str, Any]) -> JsonObject | None:
        """Wait for the end of a lease; return the result of its rollout, None when another attempt follows."""
        found = await self._pool.result_after(Lease(**lease))
        return None if found is None else asdict(found)

    def _open_store(self) -> OfferStore:
        file = self.config.pool_file
        if file is not None:
            self._parts.enter_context(only_user(file.absolute(), "agent.pool_file"))
        try:
            return OfferStore(
                ":memory:" if file is None else file.absolute(),
                max_attempts=self.config.max_attempts,
                # Agents may survive an earlier run and its pool, so fences of a new one continue with the time of day.
                first_fence=time.time_ns() // 1_000_000,
            )
        except DataError as error:
            raise ConfigError(f"agent.pool_file: {error}; choose another file") from error
