"""Episodes that outside agents may lease, and the attempts at them, in the worker that runs the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from attrs import define, field

from turnwise import Episode
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.host import RunningServer
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.pool.store import Lease, PoolResult
from turnwise_task_pool.workers.lease_renewal import LeaseRenewal


@define(eq=False)
class LeasedSession(AgentSession):
    """A session whose agent holds a lease, which has the same id."""

    lease: Lease = field(kw_only=True)


@define(eq=False)
class Offer:
    """
    An episode that outside agents may lease.

    Attributes:
        episode: to run.
        attempts: that have been leased and not been looked at; an error when no further one can come.
    """

    episode: Episode
    attempts: asyncio.Queue[LeasedSession | Exception] = field(factory=asyncio.Queue, init=False)
    _parts: SessionParts
    _server: RunningServer
    _calls: asyncio.TaskGroup
    _config: PoolConfig
    _renew: Callable[[Lease], Awaitable[bool]]
    _result: Callable[[Lease], Awaitable[PoolResult | None]]
    _last: LeasedSession | None = field(default=None, init=False)

    def open(self, lease: Lease) -> LeasedSession | None:
        """
        Open the session of a lease; that of an earlier lease ends, because the episode has one lease at a time.

        Return None for a lease that had a session before: it has expired since it was handed out.
        """
        if self._last is not None:
            if lease.fence <= self._last.lease.fence:
                return None
            self._last.end()
        self._last = leased = LeasedSession.open(
            lease.id,
            self._server,
            partial(Session, self.episode, self._parts, lease.id),
            self._calls,
            self._config.keep_requests,
            lease=lease,
            attempt=lease.attempt,
            worker=lease.worker,
        )
        # No await since the session is known, so no call has come in without its lease.
        leased.session.door.hold = LeaseRenewal(lambda: self._renew(lease), self._config.lease_s, leased.end).hold
        self.attempts.put_nowait(leased)
        return leased

    def close(self) -> None:
        """End the attempts that nobody has looked at: the episode has its result, and their calls are refused."""
        while not self.attempts.empty():
            if isinstance(attempt := self.attempts.get_nowait(), LeasedSession):
                attempt.close(is_trained=False)

    async def next_attempt(self) -> LeasedSession:
        """Wait for the next attempt; `InfrastructureError` when there can be none, because the pool is gone."""
        attempt = await self.attempts.get()
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    async def result(self, attempt: LeasedSession) -> PoolResult | None:
        """Return the end of the episode in the pool after an attempt; None when a further attempt follows."""
        return await self._result(attempt.lease)
