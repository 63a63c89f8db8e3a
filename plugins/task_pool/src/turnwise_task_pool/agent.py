"""The agent `task_pool`: an agent that runs elsewhere leases the episode, and scores it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from attrs import define, evolve, field

from turnwise import Episode, Resources, State
from turnwise.errors import InfrastructureError
from turnwise_gateway.agents.agent import build_parts
from turnwise_gateway.agents.reported import check_turns, note_score
from turnwise_gateway.agents.watch import wait_for_agent
from turnwise_gateway.host import ServerHost
from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.session.comparison import check_conversations
from turnwise_gateway.session.parts import SessionParts
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.desk import Attempt, Offer, PullHost
from turnwise_task_pool.store import PoolResult
from turnwise_task_pool.store import State as RolloutState


@define(eq=False)
class PoolAgent:
    """
    Lets an outside agent run each episode. One object serves many episodes at once.

    Args:
        config: the control port, and the rules of the sessions.
        resources: the chat template, and perhaps a tool parser and a reasoning parser.

    Raises:
        ConfigError: the run has no chat template.
    """

    config: PoolConfig
    resources: Resources
    parts: SessionParts = field(init=False)
    _host: ServerHost = field(init=False)
    _pull: PullHost = field(init=False)
    _servers: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    resumable = False

    def __attrs_post_init__(self) -> None:
        self.parts = build_parts(self.config, self.resources)
        self._host = ServerHost(self.config.model)
        self._pull = PullHost(self.config.model, self.config)

    async def open(self) -> dict[str, str]:
        server = await self._servers.enter_async_context(self._host.serve())
        desk = await self._servers.enter_async_context(self._pull.serve())
        return {"agents": server.url, "control": desk.pool.site.url}

    async def close(self) -> None:
        await self._servers.aclose()

    async def step(self, episode: Episode) -> State:
        async with (
            self._host.serve() as server,
            self._pull.serve() as desk,
            asyncio.TaskGroup() as calls,
            desk.offer(episode, self.parts, server, calls, self.config.keep_requests) as offer,
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

    async def _wait(self, offer: Offer) -> tuple[PoolResult, Attempt]:
        """Return the result of an episode and its last attempt."""
        limits = evolve(self.config, idle_s=self.config.score_s)
        while True:
            attempt = await offer.attempts.get()
            is_trained, result = True, None
            try:
                await wait_for_agent(attempt.wait(), attempt.session, limits)
                result = await offer.result(attempt)
                # A later lease may have ended meanwhile, and the result is of that one.
                is_trained = result is not None and result.fence == attempt.leased.names.fence
            finally:
                attempt.leased.end()
                attempt.close(is_trained=is_trained)
            # Its attempt follows, unless the agent died before it had a session.
            if result is not None and (is_trained or offer.attempts.empty()):
                return result, attempt
            offer.episode.record_metric("gateway/lost_attempts", 1)
