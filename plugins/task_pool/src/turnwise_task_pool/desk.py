"""
Episodes that outside agents pull: each waits in a task pool until an agent leases it.

Every lease of an episode is an attempt with a separate session. The records of an attempt that failed or whose lease
expired stay in the episode as untrained ones.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise import Episode
from turnwise.errors import ConfigError, DataError, InfrastructureError
from turnwise_gateway.agents.agent import show_task
from turnwise_gateway.control.control_server import build_runner
from turnwise_gateway.host import ModelClient, RunningServer
from turnwise_gateway.per_loop import PerLoop
from turnwise_gateway.replay.request_file import log_session
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.server.closing import close_runner
from turnwise_gateway.server.listening import listen_at
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.leased_session import LeasedSession
from turnwise_task_pool.shared_pool import POLL_S, HeldError, SharedPool, SharedStore, build_shared_app, name_task
from turnwise_task_pool.site import PullSite
from turnwise_task_pool.store import Lease, PoolResult, PoolTask
from turnwise_task_pool.task_pool import TaskPool

_MAX_ENDED: Final = 128
"""Sessions that are over and that the control port still shows."""


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
        task: the episode in the pool.
        pool: with the task.
        attempts: that have been leased and not been looked at.
    """

    episode: Episode
    task: PoolTask
    pool: TaskPool
    attempts: asyncio.Queue[Attempt] = field(factory=asyncio.Queue, init=False)
    _parts: SessionParts
    _server: RunningServer
    _calls: asyncio.TaskGroup
    _keep_requests: Path | None = None
    _last: Attempt | None = field(default=None, init=False)

    @property
    def key(self) -> tuple[str, int, int]:
        """Name of the episode in the pool."""
        return self.task.uid, self.task.global_step, self.task.rollouts[0]

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
        session.door.hold = partial(self.pool.call_of, lease)  # calls of the model and of tools renew the lease
        log_session(session, self._keep_requests)
        door = ExitStack()
        client = door.enter_context(self._server.open(lease.id, session))
        self._last = attempt = Attempt(LeasedSession(lease, session), client, door, calls)
        self.attempts.put_nowait(attempt)
        return attempt

    def close(self) -> None:
        """End the attempts that nobody has looked at: the episode has its result, and their calls are refused."""
        while not self.attempts.empty():
            attempt = self.attempts.get_nowait()
            attempt.leased.end()
            attempt.close(is_trained=False)

    async def result(self, attempt: Attempt) -> PoolResult | None:
        """Return the end of the episode in the pool after an attempt; None when a further attempt follows."""
        return await self.pool.result_after(attempt.leased.names)


@define(eq=False)
class PullDesk:
    """
    The `SessionDesk` of the episodes of an event loop.

    Attributes:
        model: name of the served model.
        pool: of the episodes.
    """

    model: str
    pool: SharedPool
    _offers: dict[tuple[str, int, int], Offer] = field(factory=dict, init=False)
    _sessions: OrderedDict[str, LeasedSession] = field(factory=OrderedDict, init=False)

    @asynccontextmanager
    async def offer(
        self,
        episode: Episode,
        parts: SessionParts,
        server: RunningServer,
        calls: asyncio.TaskGroup,
        keep_requests: Path | None = None,
    ) -> AsyncIterator[Offer]:
        """Let agents lease an episode inside the `async with` statement; their requests may be kept in a folder."""
        for copy in itertools.count():  # equal episodes may run at once, for example those of two calls
            offer = Offer(episode, _describe(episode, copy), self.pool, parts, server, calls, keep_requests)
            if await self._put(offer):
                break
        try:
            yield offer
        finally:
            await self._withdraw(offer)

    async def _put(self, offer: Offer) -> bool:
        """Put an episode into the pool; return False if an equal one is there, which runs too."""
        if offer.key in self._offers:
            return False
        self._offers[offer.key] = offer
        try:
            await self.pool.put(offer.task)
        except BaseException as error:
            await self._withdraw(offer)  # a cancelled `put` runs to its end
            if isinstance(error, HeldError):
                return False
            raise
        return True

    async def _withdraw(self, offer: Offer) -> None:
        del self._offers[offer.key]
        offer.close()
        await self.pool.abandon(offer.task, owner="infra", reason="the episode has ended")

    def open(self, lease: Lease) -> ModelClient | None:
        if (client := self.pool.opened.pop(lease.id, None)) is not None:
            return client  # in the worker that runs the episode
        offer = self._offers.get((lease.uid, lease.global_step, lease.rollout_n))
        if offer is None:
            return None
        attempt = offer.open(lease)
        if attempt is None:
            return None
        self._sessions[lease.id] = attempt.leased
        ended = [name for name, session in self._sessions.items() if session.ended.is_set()]
        for name in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._sessions[name]
        return attempt.client

    def end_lost(self, lease: Lease) -> None:
        """End the session of a lease that expired; one that has none yet gets it, because its episode waits for it."""
        self.open(lease)
        if (session := self._sessions.get(lease.id)) is not None:
            session.end()

    def find(self, session_id: str) -> LeasedSession | None:
        return self._sessions.get(session_id)

    def model_name(self) -> str:
        return self.model


def _describe(episode: Episode, copy: int) -> PoolTask:
    """Return an episode as a task."""
    task, step = episode.task, episode.global_step
    # Without the ground truth: an agent must not read the answer.
    content = {**show_task(task), "validation": episode.validation}
    uid = name_task(task.uid, validation=episode.validation, copy=copy)
    return PoolTask(uid=uid, global_step=step, rollouts=(episode.rollout_n,), content=content)


@define(eq=False)
class PullHost:
    """
    Opens and closes the control port and the pool of a worker.

    Attributes:
        model: name of the served model.
        options: of the pool and the control port.
    """

    model: str
    options: PoolConfig
    _desks: PerLoop[PullDesk] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._desks = PerLoop(self._run)

    def serve(self) -> AbstractAsyncContextManager[PullDesk]:
        """Keep the control port of the running event loop open inside the `async with` statement."""
        return self._desks.use()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[PullDesk]:
        async with AsyncExitStack() as parts:
            try:
                desk = await self._open(parts)
            except OSError as error:
                raise InfrastructureError(f"the control port cannot be opened: {error}") from error
            yield desk

    async def _open(self, parts: AsyncExitStack) -> PullDesk:
        site = PullSite(self.options)
        await asyncio.to_thread(site.join)
        parts.callback(site.clean)
        store = self._open_store(site)
        pool = SharedPool(
            store=store, capacity=self.options.capacity, lease_s=self.options.lease_s, poll_s=POLL_S, site=site
        )
        desk = PullDesk(self.model, pool)
        pool.on_lost = desk.end_lost
        await parts.enter_async_context(pool)
        options = ServerOptions(port=site.access.port)
        runner = build_runner(build_shared_app(pool, desk, options), options)
        parts.push_async_callback(close_runner, runner)
        await runner.setup()
        for listening in (site.own_socket, site.shared_socket):
            await listen_at(runner, listening)
        # Runs behind the removal of the file and before the server stops: waiting agents get a reply.
        parts.callback(pool.send_away)
        parts.callback(site.leave)
        return desk

    def _open_store(self, site: PullSite) -> SharedStore:
        try:
            return SharedStore(
                path=site.access.pool,
                max_attempts=self.options.max_attempts,
                # Agents may survive an earlier run and its pool, so fences of a new one continue with the time of day.
                first_fence=time.time_ns() // 1_000_000,
                runner=site.name,
                peers=site.peers,
            )
        except DataError as error:
            raise ConfigError(f"agent.pool_file: {error}; choose another file") from error
