"""
A task pool for one event loop: agents wait for tasks, producers wait for room, leases expire.

One task of the event loop, the keeper, hands out leases and ends those whose time is over. All others only wait for
it, so an agent that leaves while it waits cannot take a lease with it, and a thousand waiting agents cost nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, Self, TypeVar

import structlog
from attrs import define, field

from turnwise.errors import Owner
from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.store import Lease, PoolError, PoolResult, PoolTask, TaskStore

P = ParamSpec("P")
T = TypeVar("T")


def steady_clock() -> Callable[[], float]:
    """
    Return a clock whose seconds count from 1970 and never jump.

    Leases of an earlier process are compared with it, so it starts with the time of day; a correction of the time of
    day must not end leases, so it continues with the monotonic clock.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


@define(eq=False)
class _Waiter:
    worker: str
    at_once: bool
    answer: asyncio.Future[Lease | None]


@define(eq=False)
class TaskPool:
    """
    Hands out the rollouts of tasks, each until it has exactly one result. Use it as an asynchronous context manager.

    Attributes:
        store: keeps the rollouts.
        capacity: most rollouts that are ready or leased; `put` waits for room.
        lease_s: seconds after which a lease expires that nobody renews.
        poll_s: seconds between looks for changes by other processes that have the same store.
        clock: seconds, for leases.
        on_lost: called with each lease that ended without news of its agent, on the event loop; must not raise.
        counts: number of news by kind and verdict, such as `complete/late`, and of leases that were `expired`.
    """

    store: TaskStore
    capacity: int
    lease_s: float = 300.0
    poll_s: float = 1.0
    clock: Callable[[], float] = field(factory=steady_clock)
    on_lost: Callable[[Lease], None] | None = None
    counts: Counter[str] = field(factory=Counter, init=False)
    _writer: ThreadPoolExecutor = field(init=False)
    _waiters: deque[_Waiter] = field(factory=deque, init=False)
    _unseen: list[Lease] = field(factory=list, init=False)
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)
    _moved: asyncio.Condition = field(factory=asyncio.Condition, init=False)
    _putting: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _keeper: asyncio.Task[None] | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        if self.capacity < 1 or self.lease_s <= 0 or self.poll_s <= 0:
            raise PoolError("'capacity', 'lease_s' and 'poll_s' must be above 0")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="task-pool")

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def open(self, *, requeue: bool = False) -> None:
        """
        Start to hand out tasks.

        Args:
            requeue: end the leases of an earlier process, because the sessions of their agents died with it; else
                they get `lease_s` more, because nobody could renew them.
        """
        if requeue:
            await self._do(self.store.requeue)
        else:
            await self._do(self.store.recover, now=self.clock(), lease_s=self.lease_s)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="task-pool-keeper")

    async def close(self) -> None:
        """Send waiting agents away and close the store; leases stay for the next process."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self._announce()
        await asyncio.to_thread(self._writer.shutdown)
        self.store.close()

    # Producers

    async def put(self, task: PoolTask) -> None:
        """
        Add a task, and wait while the pool is full; producers get room in the order in which they came.

        Raises:
            PoolError: the pool has this task with another content, it never fits, or the pool was closed.
        """
        try:
            async with self._putting:
                await self._wait_for(partial(self.store.put, task, capacity=self.capacity))
        finally:
            self._changed.set()

    async def put_all(self, tasks: Iterable[PoolTask]) -> None:
        """Add tasks as there is room for them."""
        for task in tasks:
            await self.put(task)

    async def drain(self) -> None:
        """
        Wait until every task in the pool has its results: no agent has a lease, and none can get one.

        Raises:
            PoolError: the pool was closed before.
        """
        await self._wait_for(self.store.is_empty)

    async def results(self, *, after: int = 0, wait: bool = True) -> list[PoolResult]:
        """
        Return the results after a number, and wait until there is one.

        A reader that saves the last number with its own state gets each result exactly once.

        Raises:
            PoolError: the pool was closed before.
        """
        found: list[PoolResult] = []

        def read() -> bool:
            found[:] = self.store.results(after=after)
            return bool(found) or not wait

        await self._wait_for(read)
        return found

    async def result_after(self, lease: Lease) -> PoolResult | None:
        """Wait for the end of a lease; return the result of its rollout, and None when another attempt follows."""
        # A report after the time of a lease is late, although the keeper may end the lease later. Only this end gives
        # the rollout of a last attempt its result.
        await self._wait_for(lambda: not self.store.is_leased(lease))
        return await self._do(self.store.result_of, lease.uid, lease.global_step, lease.rollout_n)

    async def abandon(self, task: PoolTask, *, owner: Owner, reason: str) -> None:
        """End the rollouts of a task that nobody wants any more; late news of their agents change nothing."""
        try:
            for rollout_n in task.rollouts:
                names = task.uid, task.global_step, rollout_n
                await self._do(partial(self.store.abandon, *names, owner=owner, reason=reason))
        finally:
            self._changed.set()

    async def _wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until a function of the store returns True; it runs again after each change."""
        async with self._moved:
            while not await self._do(is_done):
                await self._moved.wait()

    # Agents

    async def lease(self, worker: str, *, wait_s: float = 0.0) -> Lease | None:
        """Lease a rollout; wait for one up to `wait_s` seconds, in the order in which agents came."""
        self._check_open()
        loop = asyncio.get_running_loop()
        waiter = _Waiter(worker, wait_s <= 0, loop.create_future())
        self._waiters.append(waiter)
        self._changed.set()
        timer = None if waiter.at_once else loop.call_later(wait_s, _dismiss, waiter)
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            # The agent left after it got a lease that it cannot have seen.
            if not waiter.answer.cancelled() and (lease := waiter.answer.result()) is not None:
                self.take_back(lease)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:  # it left, or waited in vain
                self._waiters.remove(waiter)

    def take_back(self, lease: Lease) -> None:
        """Let others have a lease that its agent cannot have seen; the attempt does not count."""
        self._unseen.append(lease)
        self._changed.set()

    def send_away(self) -> None:
        """Let the agents that wait go without a lease."""
        for waiter in self._waiters:
            _dismiss(waiter)

    async def heartbeat(self, lease_id: str, fence: int) -> Verdict:
        """Renew a lease for `lease_s` from now."""
        verdict = await self._do(self.store.renew, lease_id, fence, now=self.clock(), lease_s=self.lease_s)
        return self._note("heartbeat", verdict)

    async def complete(
        self, lease_id: str, fence: int, *, score: object = None, metrics: Mapping[str, float] | None = None
    ) -> Verdict:
        """End a rollout with a score; None means that it is not scored."""
        end = partial(self.store.complete, lease_id, fence, now=self.clock(), score=score, metrics=metrics)
        return await self._end("complete", end)

    async def fail(self, lease_id: str, fence: int, *, reason: str, owner: Owner = "agent") -> Verdict:
        """End an attempt that failed."""
        end = partial(self.store.fail, lease_id, fence, now=self.clock(), owner=owner, reason=reason)
        return await self._end("fail", end)

    async def _end(self, kind: str, end: Callable[[], Verdict]) -> Verdict:
        try:
            verdict = await self._do(end)
        finally:
            # Also when the caller leaves: the store ends the lease all the same, before the keeper's next question.
            self._changed.set()
        return self._note(kind, verdict)

    async def find_end(self, lease_id: str) -> Verdict:
        """Return `LATE` for a lease that has no session any more, and `UNKNOWN` for one that never was."""
        return await self._do(self.store.find_end, lease_id)

    async def leases(self) -> list[Lease]:
        """Return the leases that have not ended."""
        return await self._do(self.store.leases)

    async def stats(self) -> dict[str, int]:
        """Return the number of rollouts in each state, of waiting agents, and the counts of news."""
        states = await self._do(self.store.count)
        return {
            **{str(state): number for state, number in states.items()},
            "waiting": len(self._waiters),
            **self.counts,
        }

    # The keeper

    async def _keep(self) -> None:
        try:
            seen = 0
            while True:
                is_changed = self._changed.is_set()
                self._changed.clear()
                is_changed |= await self._end_expired()
                await self._hand_out()
                changes = await self._do(self.store.changes)
                if is_changed or changes != seen:
                    seen = changes
                    await self._announce()
                await self._sleep()
        except Exception as error:  # noqa: BLE001 - every later call raises it
            # A broken disk: whoever waits gets the error, and later calls too.
            structlog.get_logger().exception("the task pool failed")
            self._error = (error.__cause__ if isinstance(error, PoolError) else None) or error
            self._closed = True
            await self._announce()

    async def _sleep(self) -> None:
        """Wait for a change, the next expiry, or the next look for changes by other processes."""
        until = await self._do(self.store.next_expiry)
        delay = self.poll_s if until is None else min(self.poll_s, max(0.0, until - self.clock()))
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._changed.wait()

    async def _end_expired(self) -> bool:
        """End the leases whose time is over, and return whether there were any."""
        lost = await self._do(self.store.expire, now=self.clock())
        for lease in lost:
            self.counts["expired"] += 1
            if self.on_lost is not None:
                self.on_lost(lease)
        return bool(lost)

    async def _hand_out(self) -> None:
        while self._unseen:
            await self._do(self.store.withdraw, self._unseen.pop())
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.answer.done():
                self._waiters.popleft()
                continue
            lease = await self._do(self.store.lease, waiter.worker, now=self.clock(), lease_s=self.lease_s)
            if lease is None:
                break
            # No await between the look at the waiter and its answer: it has the lease, or the lease is withdrawn.
            if not waiter.answer.done():
                self._waiters.popleft()
                waiter.answer.set_result(lease)
            else:
                await self._do(self.store.withdraw, lease)
        for waiter in self._waiters:
            if waiter.at_once:
                _dismiss(waiter)

    async def _announce(self) -> None:
        """Let everyone who waits for a change look again; agents leave when the pool is closed."""
        async with self._moved:
            self._moved.notify_all()
        if self._closed:
            self.send_away()

    def _note(self, kind: str, verdict: Verdict) -> Verdict:
        self.counts[f"{kind}/{verdict}"] += 1
        return verdict

    def _check_open(self) -> None:
        if self._error is not None:
            raise PoolError(f"the task pool failed: {self._error!r}") from self._error
        if self._closed:
            raise PoolError("the task pool was closed")

    async def _do(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Run a function of the store in the only thread that uses it, to its end even if the caller leaves.

        A broken store is a `PoolError` for the caller that notices it first, as it is for all later ones.
        """
        self._check_open()
        work = asyncio.get_running_loop().run_in_executor(self._writer, partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except (OSError, sqlite3.Error) as error:
            raise PoolError(f"the task pool failed: {error!r}") from error


def _dismiss(waiter: _Waiter) -> None:
    if not waiter.answer.done():
        waiter.answer.set_result(None)
