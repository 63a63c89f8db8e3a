"""The agent `task_pool`: an agent that runs elsewhere leases the episode, and scores it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from attrs import define, evolve, field

from turnwise import Episode, Resources, State
from turnwise.errors import ConfigError, InfrastructureError
from turnwise.protocols import Service, ServiceClient
from turnwise.types import Capabilities
from turnwise_gateway.agents.agent import build_parts, check_grammars
from turnwise_gateway.agents.reported import check_turns, note_score
from turnwise_gateway.agents.watch import wait_for_agent
from turnwise_gateway.host import RunningServer
from turnwise_gateway.per_loop import PerLoop
from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.session.comparison import check_conversations
from turnwise_gateway.session.parts import SessionParts
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.driver.service import PoolService
from turnwise_task_pool.pool.store import PoolResult
from turnwise_task_pool.pool.store import State as RolloutState
from turnwise_task_pool.workers.attempts import LeasedSession, Offer
from turnwise_task_pool.workers.worker import PoolWorker


@define(eq=False)
class PoolAgent:
    """
    Lets an outside agent run each episode. One object serves many episodes at once.

    The pool and its control port are a service of the driver; here are the sessions, and the port that their model
    calls come to.

    Args:
        config: the control port, and the rules of the sessions.
        resources: the chat template, and perhaps a tool parser and a reasoning parser.

    Raises:
        ConfigError: the run has no chat template.
    """

    config: PoolConfig
    resources: Resources
    parts: SessionParts = field(init=False)
    _service: ServiceClient = field(init=False)
    _workers: PerLoop[PoolWorker] = field(init=False)
    _opened: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    resumable = False

    def __attrs_post_init__(self) -> None:
        self.parts = build_parts(self.config, self.resources)
        self._workers = PerLoop(self._run)

    def check_engine(self, capabilities: Capabilities) -> None:
        check_grammars(self.config, capabilities)

    def make_service(self) -> Service:
        return PoolService(self.config)

    def connect(self, service: ServiceClient) -> None:
        self._service = service

    async def open(self) -> dict[str, str]:
        return {"agents": (await self._opened.enter_async_context(self._workers.use())).server.url}

    async def close(self) -> None:
        await self._opened.aclose()

    async def step(self, episode: Episode) -> State:
        async with (
            self._workers.use() as worker,
            asyncio.TaskGroup() as calls,
            worker.offer(episode, self.parts, calls) as offer,
        ):
            result, attempt = await self._wait(offer)
        await check_conversations(attempt.session.book)
        if attempt.session.error is not None:  # a listener may fail at the end of a session
            raise attempt.session.error
        if result.state is RolloutState.DEAD:
            if result.owner == "infra":
                raise InfrastructureError(result.reason)
            raise ProgramFailedError(result.reason)
        check_turns(attempt.session)
        note_score(attempt.session, result.score, result.metrics)
        return State.TERMINATED

    async def _wait(self, offer: Offer) -> tuple[PoolResult, LeasedSession]:
        """Return the result of an episode and its last attempt."""
        limits = evolve(self.config, idle_s=self.config.score_s)
        while True:
            attempt = await offer.next_attempt()
            is_trained, result = True, None
            try:
                await wait_for_agent(attempt.wait(), attempt.session, limits)
                result = await offer.result(attempt)
                # A later lease may have ended meanwhile, and the result is of that one.
                is_trained = result is not None and result.fence == attempt.lease.fence
            finally:
                attempt.close(is_trained=is_trained)
            # Its attempt follows, unless the agent died before it had a session.
            if result is not None and (is_trained or offer.attempts.empty()):
                return result, attempt
            offer.episode.record_metric("gateway/lost_attempts", 1)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[PoolWorker]:
        server = RunningServer(self.config.model, self._server_options())
        await server.start()
        try:
            worker = PoolWorker(self._service, server, self.config)
            await worker.open()
            try:
                yield worker
            finally:
                await worker.close()
        finally:
            await server.stop()

    def _server_options(self) -> ServerOptions:
        host, driver_host = self._service.host, self._service.driver_host
        if not self.config.allow_remote:
            if host != driver_host:
                raise ConfigError(
                    f"agent.allow_remote: a worker runs on {host}, and the control port is on {driver_host}: agents "
                    "need both, so set it to true, which lets other machines connect"
                )
            return ServerOptions()
        own = self.config.listen_at(host) if host == driver_host else host
        return ServerOptions(host=own, allow_remote=True)
