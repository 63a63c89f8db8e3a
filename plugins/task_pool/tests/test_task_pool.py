"""Agents and producers of one event loop share a pool."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import Lease, PoolError, PoolResult, PoolTask, State
from turnwise_task_pool.pool.task_pool import TaskPool, steady_clock

LEASE_S = 10.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@asynccontextmanager
async def pool_in(folder: Path, clock: Clock, *, capacity: int = 8, **options: object) -> AsyncIterator[TaskPool]:
    """Open a pool; its store trusts each rollout with three attempts."""
    store = SqliteStore(folder / "pool.sqlite", trace=options.pop("trace", None))
    store._run("PRAGMA synchronous=OFF")  # no test here cuts the power
    async with TaskPool(store, capacity, lease_s=LEASE_S, clock=clock, **options) as pool:
        yield pool


async def pass_time(pool: TaskPool, clock: Clock, seconds: float) -> None:
    """Move the clock, and wait until the pool has looked at it."""
    clock.now += seconds
    pool._changed.set()
    for _ in range(10):  # the keeper does less than ten things in a round, and the store one after the other
        await settle()
        await pool.stats()


async def settle() -> None:
    """Let everything run that can run."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_waiting_agents_are_served_in_their_order(tmp_path: Path, clock: Clock) -> None:
    """The agent that waits longest gets the first task; one that left gets none, and its task is not lost."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool, asyncio.TaskGroup() as group:
            agents = []
            for name in "abc":
                agents.append(group.create_task(pool.lease(name, wait_s=60)))
                await settle()
            agents[1].cancel()
            await settle()
            await pool.put(PoolTask(uid="t", rollouts=range(2)))
            found = [await agents[0], await agents[2]]
            assert [("a", 0), ("c", 1)] == [(each.worker, each.rollout_n) for each in found]

    asyncio.run(run())


def test_an_agent_that_leaves_with_an_unseen_lease_loses_no_task(tmp_path: Path, clock: Clock) -> None:
    """The lease is withdrawn at once, and the attempt does not count."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool:
            agent = pool.lease("a", wait_s=60)
            answer = agent.send(None)  # it waits
            served = asyncio.Event()
            answer.add_done_callback(lambda _answer: served.set())
            await pool.put(PoolTask(uid="t"))
            await served.wait()
            with pytest.raises(asyncio.CancelledError):
                agent.throw(asyncio.CancelledError())
            lease = await pool.lease("b", wait_s=60)
            assert ("b", 1) == (lease.worker, lease.attempt)

    asyncio.run(run())


def test_no_task_in_time(tmp_path: Path, clock: Clock) -> None:
    """An agent that waits in vain gets None, without or with a time to wait."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool:
            assert await pool.lease("a") is None
            assert await pool.lease("a", wait_s=0.01) is None
            assert (await pool.stats())["waiting"] == 0

    asyncio.run(run())


def test_a_thousand_waiting_agents_are_idle(tmp_path: Path, clock: Clock) -> None:
    """While they wait, the pool looks at the store once for each period, and not once for each agent."""
    statements: list[str] = []

    async def run() -> None:
        trace = statements.append
        async with pool_in(tmp_path, clock, capacity=1000, poll_s=3600, trace=trace) as pool:
            async with asyncio.TaskGroup() as group:
                agents = [group.create_task(pool.lease(str(number), wait_s=3600)) for number in range(1000)]
                for _ in range(20):
                    await settle()
                    await pool.stats()  # the store's thread has done everything before
                assert len(pool._waiters) == 1000
                before = len(statements)
                for _ in range(2000):
                    await asyncio.sleep(0)
                assert len(statements) == before
                await pool.put(PoolTask(uid="t", rollouts=range(1000)))
                await asyncio.wait(agents)
            leases = [agent.result() for agent in agents]
            assert [(str(n), n) for n in range(1000)] == [(each.worker, each.rollout_n) for each in leases]

    asyncio.run(run())


def test_producers_wait_for_room(tmp_path: Path, clock: Clock) -> None:
    """Tasks come in when others end, in the order of their producers, also when a later one is smaller."""

    async def run() -> None:
        async with pool_in(tmp_path, clock, capacity=3) as pool, asyncio.TaskGroup() as group:
            await pool.put(PoolTask(uid="a", rollouts=range(2)))
            first = group.create_task(pool.put(PoolTask(uid="b", rollouts=range(2))))
            await settle()
            second = group.create_task(pool.put(PoolTask(uid="c")))
            lease = await pool.lease("w")
            await settle()
            assert not first.done()
            assert not second.done()
            await pool.complete(lease.id, lease.fence, score=1.0)
            await first
            await settle()
            assert not second.done()
            lease = await pool.lease("w")
            await pool.complete(lease.id, lease.fence, score=1.0)
            await second

    asyncio.run(run())


def test_drain_waits_for_every_lease(tmp_path: Path, clock: Clock) -> None:
    """It returns when all have ended, however they ended, and then there is nothing to lease."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool, asyncio.TaskGroup() as group:
            await pool.put(PoolTask(uid="a", rollouts=range(2)))
            draining = group.create_task(pool.drain())
            done = await pool.lease("w")
            await pool.complete(done.id, done.fence, score=1.0)
            for _ in range(3):  # attempts of the other
                await settle()
                assert not draining.done()
                assert await pool.lease("w") is not None
                await pass_time(pool, clock, LEASE_S)
            await draining
            assert await pool.lease("w") is None
            last = (await pool.results())[-1]
            assert ("dead", "infra", 3) == (last.state, last.owner, last.attempt)
            assert "'w' expired" in last.reason

    asyncio.run(run())


def test_the_result_after_a_lease_waits_for_its_end(tmp_path: Path, clock: Clock) -> None:
    """A report of a last attempt may be late before the pool has ended the lease; the result comes with this end."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool:
            await pool.put(PoolTask(uid="a"))
            for _attempt in range(2):
                lease = await pool.lease("w")
                await pool.fail(lease.id, lease.fence, reason="lost", owner="infra")
                assert await pool.result_after(lease) is None
            lease = await pool.lease("w")
            clock.now += LEASE_S  # without a wake-up of the keeper
            waiting = asyncio.ensure_future(pool.result_after(lease))
            assert Verdict.LATE is await pool.complete(lease.id, lease.fence, score=1.0)
            result = await waiting
            assert (State.DEAD, "infra", None) == (result.state, result.owner, result.score)

    asyncio.run(run())


def test_lost_leases_are_told_and_counted(tmp_path: Path, clock: Clock) -> None:
    """The owner of the session hears of it; late news are counted and change nothing."""
    lost: list[Lease] = []

    async def run() -> None:
        async with pool_in(tmp_path, clock, on_lost=lost.append) as pool:
            await pool.put(PoolTask(uid="a"))
            lease = await pool.lease("w")
            await pass_time(pool, clock, LEASE_S - 1)
            assert await pool.heartbeat(lease.id, lease.fence) is Verdict.ACCEPTED
            await pass_time(pool, clock, LEASE_S - 1)
            assert lost == []
            await pass_time(pool, clock, 1)
            assert [lease.id] == [each.id for each in lost]
            assert await pool.complete(lease.id, lease.fence, score=1.0) is Verdict.LATE
            assert await pool.heartbeat(lease.id, lease.fence) is Verdict.LATE
            stats = await pool.stats()
            assert {"complete/late": 1, "heartbeat/late": 1, "expired": 1}.items() <= stats.items()
            assert stats["done"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("requeue", [True, False])
def test_a_restart_keeps_tasks(tmp_path: Path, clock: Clock, requeue: bool) -> None:
    """The next pool continues; its agents keep their leases unless their sessions have died with the first."""

    async def run() -> None:
        async with pool_in(tmp_path, clock) as pool:
            await pool.put(PoolTask(uid="a", rollouts=range(2)))
            old = await pool.lease("w")
        clock.now += 100 * LEASE_S
        pool = TaskPool(SqliteStore(tmp_path / "pool.sqlite"), 8, lease_s=LEASE_S, clock=clock)
        await pool.open(requeue=requeue)
        verdict = await pool.complete(old.id, old.fence, score=1.0)
        assert verdict is (Verdict.LATE if requeue else Verdict.ACCEPTED)
        lease = await pool.lease("w")
        assert (0, 2) if requeue else (1, 1) == (lease.rollout_n, lease.attempt)
        await pool.close()

    asyncio.run(run())


def test_two_pools_on_one_file(tmp_path: Path, clock: Clock) -> None:
    """An agent that waits at one pool gets the task that another one took in, and a producer the room."""

    async def run() -> None:
        options = {"capacity": 1, "poll_s": 0.01}
        async with (
            pool_in(tmp_path, clock, **options) as one,
            pool_in(tmp_path, clock, **options) as other,
            asyncio.TaskGroup() as group,
        ):
            agent = group.create_task(one.lease("w", wait_s=60))
            await settle()
            await other.put(PoolTask(uid="a"))
            lease = await agent
            putting = group.create_task(other.put(PoolTask(uid="b")))
            await settle()
            assert not putting.done()
            await one.complete(lease.id, lease.fence, score=1.0)
            await putting

    asyncio.run(run())


def test_a_closed_pool_lets_everyone_leave(tmp_path: Path, clock: Clock) -> None:
    """Agents get no task, and producers and readers an error."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            async with pool_in(tmp_path, clock, capacity=1) as pool:
                await pool.put(PoolTask(uid="a"))
                await pool.lease("v")
                agent = group.create_task(pool.lease("w", wait_s=60))
                waits = [
                    group.create_task(_fails(each))
                    for each in (pool.put(PoolTask(uid="b")), pool.drain(), pool.results())
                ]
                await settle()
            assert await agent is None
            assert ["the task pool was closed"] * 3 == [await each for each in waits]
            assert "the task pool was closed" == await _fails(pool.lease("w"))

    asyncio.run(run())


async def _fails(coroutine: object) -> str:
    with pytest.raises(PoolError) as error:
        await coroutine
    return str(error.value)


def test_a_broken_store_fails_every_wait(tmp_path: Path, clock: Clock) -> None:
    """No one waits for a keeper that has died."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            pool = TaskPool(SqliteStore(tmp_path / "pool.sqlite"), 1, clock=clock)
            await pool.open()
            agent = group.create_task(pool.lease("w", wait_s=60))
            draining = group.create_task(_fails(pool.results()))
            for _ in range(5):  # both wait when the store has done what they asked for
                await settle()
                await pool.stats()
            await pool._do(pool.store.close)  # SQLite crashes if one thread closes a file that another one reads
            pool._changed.set()
            assert await agent is None
            assert "closed database" in await draining
            await pool.close()

    asyncio.run(run())


def test_the_first_who_meets_a_broken_store_gets_the_pools_error(tmp_path: Path, clock: Clock) -> None:
    """A call that comes before the keeper has noticed gets the same error as one that comes after."""

    async def run() -> None:
        pool = TaskPool(SqliteStore(tmp_path / "pool.sqlite"), 1, clock=clock)
        await pool.open()
        await pool._do(pool.store.close)
        assert "closed database" in await _fails(pool.results(wait=False))
        await pool.close()

    asyncio.run(run())


def test_the_clock_runs_from_the_time_of_day() -> None:
    """It can be compared with the times of another process, and never decreases."""
    one, other = steady_clock(), steady_clock()

    assert abs(one() - other()) < 1.0
    assert one() <= one()


@given(seed=st.integers(0, 10**6))
def test_every_rollout_has_one_result(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Agents that die, stall, fail and repeat themselves leave each rollout with one result."""
    asyncio.run(live(tmp_path_factory.mktemp("pool"), seed, num_rollouts=24, num_agents=5))


@pytest.mark.slow
def test_ten_thousand_leases(tmp_path: Path) -> None:
    """The same with 10,000 leases and more."""
    num_leases = asyncio.run(live(tmp_path, seed=0, num_rollouts=8000, num_agents=50))

    assert num_leases >= 10_000


@define(eq=False)
class Crowd:
    """Agents that are killed, stall, fail, succeed and repeat themselves, by chance."""

    pool: TaskPool
    clock: Clock
    working: asyncio.TaskGroup
    chance: random.Random
    accepted: dict[tuple[str, int], float] = field(factory=dict)
    leases: Counter[tuple[str, int]] = field(factory=Counter)

    async def run_agent(self, name: str) -> None:
        while True:
            lease = await self.pool.lease(name, wait_s=3600)
            assert lease is not None
            # Not awaited itself: when everything has ended, an agent is sent away, but its last news are waited for.
            await asyncio.wait([self.working.create_task(self.work(lease))])

    async def work(self, lease: Lease) -> None:
        key = lease.uid, lease.rollout_n
        self.leases[key] += 1
        fate = self.chance.random()
        if fate < 0.1:
            return  # killed
        if fate < 0.2:
            self.clock.now += LEASE_S  # stalls, and everyone with it
        elif fate < 0.3:
            await self.pool.fail(lease.id, lease.fence, reason="no idea")
        score = self.chance.random()
        for _ in range(self.chance.choice([1, 1, 2])):
            if await self.pool.complete(lease.id, lease.fence, score=score) is Verdict.ACCEPTED:
                assert key not in self.accepted
                self.accepted[key] = score

    async def pass_time(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.clock.now += 0.5
            self.pool._changed.set()


async def live(folder: Path, seed: int, *, num_rollouts: int, num_agents: int) -> int:
    """Run agents on tasks of four rollouts until all have ended, check the results and return the number of leases."""
    tasks = [PoolTask(uid=str(number), rollouts=range(4)) for number in range(num_rollouts // 4)]
    clock = Clock()
    async with pool_in(folder, clock, capacity=40) as pool:
        async with asyncio.TaskGroup() as working, asyncio.TaskGroup() as group:
            crowd = Crowd(pool, clock, working, random.Random(seed))
            others = [group.create_task(crowd.run_agent(str(number))) for number in range(num_agents)]
            others.append(group.create_task(crowd.pass_time()))
            await pool.put_all(tasks)
            await pool.drain()
            for each in others:
                each.cancel()
        results = await every_result(pool)
    assert {(task.uid, n) for task in tasks for n in task.rollouts} == {(each.uid, each.rollout_n) for each in results}
    assert len(results) == num_rollouts
    for each in results:
        key = each.uid, each.rollout_n
        assert (each.state == "done") == (key in crowd.accepted)
        assert each.score == crowd.accepted.get(key)
        assert each.attempt == crowd.leases[key] <= 3
    return crowd.leases.total()


async def every_result(pool: TaskPool) -> list[PoolResult]:
    """Return all results of a pool."""
    found: list[PoolResult] = []
    while page := await pool.results(after=len(found), wait=False):
        found += page
    return found
