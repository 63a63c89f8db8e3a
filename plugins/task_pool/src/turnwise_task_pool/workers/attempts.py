"""Episodes that outside agents may lease, and the attempts at them, in the worker that runs the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from attrs import define, field

from turnwise import Episode
from turnwise_gateway.host import ModelClient, RunningServer
from turnwise_gateway.replay.request_file import log_session
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.pool.store import Lease, PoolResult
from turnwise_task_pool.workers.lease_renewal import LeaseRenewal
from turnwise_task_pool.workers.leased_session import LeasedSession


@define(eq=False)
class Attempt:
    """
    A lease of an episode and its session.

    Attributes:
        leased: the session as the control port sees it.
        client: of the session.
    """

    leased: LeasedSession
    client: ModelClient
    _door: ExitStack
    _calls: set[asyncio.Task[None]]

    @property
    def session(self) -> Session:
        """The session that answers the calls."""
        return self.leased.session

    async def wait(self) -> None:
        """Wait for the end of the lease; calls in flight end with it."""
        try:
            await self.leased.ended.wait()
        finally:
            self.leased.end()
            for call in self._calls:
                call.cancel()

    def close(self, *, is_trained: bool) -> None:
        """Refuse further calls, and describe the records."""
        self._door.close()
        self.session.close(is_trained=is_trained)


@define(eq=False)
class Offer:
    """
    An episode that outside agents may lease.

    Attributes:
        episode: to run.
        attempts: that have been leased and not been looked at; an error when no further one can come.
    """

    episode: Episode
    attempts: asyncio.Queue[Attempt | Exception] = field(factory=asyncio.Queue, init=False)
    _parts: SessionParts
    _server: RunningServer
    _calls: asyncio.TaskGroup
    _config: PoolConfig
    _renew: Callable[[Lease], Awaitable[bool]]
    _result: Callable[[Lease], Awaitable[PoolResult | None]]
    _last: Attempt | None = field(default=None, init=False)

    def open(self, lease: Lease) -> Attempt | None:
        """
        Open the session of a lease; that of an earlier lease ends, because the episode has one lease at a time.

        Return None for a lease that had a session before: it has expired since it was handed out.
        """
        if self._last is not None:
            if lease.fence <= self._last.leased.names.fence:
                return None
            self._last.leased.end()
        calls: set[asyncio.Task[None]] = set()

        def spawn(call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = self._calls.create_task(call)
            calls.add(task)
            task.add_done_callback(calls.discard)
            return task

        session = Session(self.episode, self._parts, lease.id, spawn)
        leased = LeasedSession(lease, session)
        session.door.hold = LeaseRenewal(lambda: self._renew(lease), self._config.lease_s, leased.end).hold
        log_session(session, self._config.keep_requests)
        door = ExitStack()
        client = door.enter_context(self._server.open(lease.id, session))
        self._last = attempt = Attempt(leased, client, door, calls)
        self.attempts.put_nowait(attempt)
        return attempt

    def close(self) -> None:
        """End the attempts that nobody has looked at: the episode has its result, and their calls are refused."""
        while not self.attempts.empty():
            if isinstance(attempt := self.attempts.get_nowait(), Attempt):
                attempt.leased.end()
                attempt.close(is_trained=False)

    async def next_attempt(self) -> Attempt:
        """Wait for the next attempt; `InfrastructureError` when there can be none, because the pool is gone."""
        attempt = await self.attempts.get()
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    async def result(self, attempt: Attempt) -> PoolResult | None:
        """Return the end of the episode in the pool after an attempt; None when a further attempt follows."""
        return await self._result(attempt.leased.names)
