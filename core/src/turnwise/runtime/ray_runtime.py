"""
The Ray runtime: workers and replicas are actors, supervised by the driver.

A replica that dies or stops answering is restarted with back-off while its requests go on elsewhere
(`turnwise.runtime.replica_group`); a worker that dies has its unfinished episodes run again
(`turnwise.runtime.worker_group`). What happens to each episode stands in `turnwise.runtime.books`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from attrs import define, field

from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.episode_setup import EpisodeSpec
from turnwise.result import EpisodeResult
from turnwise.runtime.books import Books
from turnwise.runtime.cluster import Cluster, answer
from turnwise.runtime.group_weights import GroupWeights
from turnwise.runtime.placement import RunPlacement, check_interpreters, placement_of_runtime
from turnwise.runtime.ray_actors import Blueprint
from turnwise.runtime.ray_placement import check_room
from turnwise.runtime.replica_group import ReplicaGroup
from turnwise.runtime.reward_group import RewardGroup
from turnwise.runtime.supervision import Keeper, Patience, Seat, Supervisor, live, settled
from turnwise.runtime.worker import Deliver
from turnwise.runtime.worker_group import WorkerGroup
from turnwise.telemetry import Observers
from turnwise.weights import UpdateReport


@define(eq=False)
class RayRuntime:
    """
    Runs episodes on a Ray cluster.

    Attributes:
        blueprint: what every process builds its parts from.
        config: how many of what, and where.
        observers: who hears in the driver.
        books: where every episode is.
        cluster: where the actors are.
        placement: what is reserved for whom; follows from `config` unless given.
        weights: how new weights reach the policy's replicas.
        pools: the replicas, by name: `policy`, and `judge` when there is one.
        workers: what drives episodes.
        rewards: what scores them, when they are not scored where they run.
    """

    blueprint: Blueprint
    config: RuntimeConfig = field(factory=lambda: RuntimeConfig(name="ray"))
    observers: Observers = field(factory=Observers)
    placement: RunPlacement | None = None
    weights: GroupWeights = field(factory=GroupWeights)
    books: Books = field(init=False)
    cluster: Cluster = field(init=False)
    pools: dict[str, ReplicaGroup] = field(init=False)
    workers: WorkerGroup = field(init=False)
    rewards: RewardGroup | None = field(default=None, init=False)
    _supervisor: Supervisor = field(init=False)
    _supervision: asyncio.Task[None] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with empty seats."""
        options = self._options
        self.books = Books(options.max_kills)
        self.cluster = Cluster(options.address)
        self.placement = self.placement or placement_of_runtime(self.config)
        self.pools = {
            pool.name: ReplicaGroup(self.blueprint, pool, options, self.cluster, clients=self._clients)
            for pool in self.placement.pools
        }
        self.policy.weights = self.weights
        judges = {name: pool for name, pool in self.pools.items() if name == "judge"}
        if self.config.reward_workers:
            self.rewards = RewardGroup(
                self.blueprint, self.config, self.cluster, judges, clients=lambda: self.workers.seats
            )
        self.workers = WorkerGroup(
            self.blueprint, self.config, self.cluster, self.pools, self.books, self.observers, self.rewards
        )
        patience = Patience(
            max_restarts=options.max_restarts, max_starts=options.max_starts, backoff_s=options.backoff_s
        )
        self._supervisor = Supervisor(patience, self.observers)

    @property
    def _options(self) -> RayConfig:
        return self.config.ray

    @property
    def _stages(self) -> tuple[tuple[Keeper, ...], ...]:
        """Who is started when: those of a stage use those of the stages before."""
        rewards = () if self.rewards is None else (self.rewards,)
        return tuple(self.pools.values()), rewards, (self.workers,)

    @property
    def policy(self) -> ReplicaGroup:
        """The replicas that sample episodes."""
        return self.pools["policy"]

    def _clients(self) -> list[Seat]:
        return [*self.workers.seats, *(self.rewards.seats if self.rewards is not None else ())]

    @property
    def _seats(self) -> list[Seat]:
        return [seat for stage in self._stages for keeper in stage for seat in keeper.seats]

    async def start(self) -> None:
        """Connect and start every actor; `EngineError` says why one could not."""
        if self.placement is not None:
            check_interpreters(self.placement)
        await self.cluster.connect()
        if self.placement is not None:
            check_room(self.placement, await self.cluster.nodes())
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())
        await settled(self._seats)

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver, cut: asyncio.Event | None = None) -> None:
        """Run every spec and deliver each exactly once; `cut` aborts those that have not ended."""
        ended = asyncio.Event()

        def announce(number: int, result: EpisodeResult) -> None:
            self.observers.emit("on_episode_finished", result)
            deliver(number, result)

        keys = self.books.open(specs, announce, ended.set)
        self.workers.begin(len(specs))
        async with asyncio.TaskGroup() as waiting:
            cutting = waiting.create_task(self._cut_at(cut, keys)) if cut else None
            await ended.wait()
            if cutting:
                cutting.cancel()

    async def _cut_at(self, cut: asyncio.Event, keys: Sequence[int]) -> None:
        await cut.wait()
        self.workers.cut(keys)

    async def abort(self) -> None:
        """End soon; `run` returns when every episode has been delivered."""
        self.workers.abort()

    async def update_weights(self, weights: Any, version: int) -> UpdateReport:
        """Bring weights to every replica of the policy, also while episodes run."""
        return await self.weights.update(self.policy.seats, weights, version, self.policy.end)

    async def sleep(self, level: int) -> None:
        """Put the policy's replicas to sleep."""
        await self.weights.sleep(self.policy.seats, level)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Wake them."""
        await self.weights.wake_up(self.policy.seats, tags)

    async def memory_bytes(self) -> int:
        """Return what they hold together."""
        numbers = [await seat.handle.stats.remote() for seat in live(self.policy.seats)]
        return int(sum(each.get("memory_bytes", 0) for each in numbers))

    async def counts(self) -> dict[str, int]:
        """Return how often episodes were run again, actors restarted and requests moved."""
        known = [await _stats(seat) for seat in live(self.workers.seats)]
        return {
            "retried": self.books.num_retried,
            "set_aside": self.books.num_set_aside,
            "worker_restarts": sum(max(0, seat.num_starts - 1) for seat in self.workers.seats),
            "replica_restarts": sum(max(0, seat.num_starts - 1) for seat in self.policy.seats),
            "moves": int(sum(numbers.get("num_moves", 0) for numbers in known)),
        }

    async def stop(self) -> None:
        """Stop every actor, and the cluster when it was started here; harmless a second time."""
        self._supervisor.stopping = True
        for stage in reversed(self._stages):
            for keeper in stage:
                for seat in live(keeper.seats):
                    await answer(seat.handle.stop.remote(), 10.0)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision], timeout=10)
            self._supervision = None
        for seat in live(self._seats):
            self.cluster.kill(seat.handle)
            seat.handle = None
        for stage in self._stages:
            for keeper in stage:
                await keeper.close()
        await self.cluster.close()

    async def stats(self) -> list[dict[str, float]]:
        """Return the numbers of every replica, then of every worker."""
        return [await seat.handle.stats.remote() for seat in live(self._seats)]

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            for stage in self._stages:
                seats = [(keeper, seat) for keeper in stage for seat in keeper.seats]
                for keeper, seat in seats:
                    group.create_task(self._supervisor.keep(keeper, seat))
                for _keeper, seat in seats:
                    await seat.settled.wait()


async def _stats(seat: Seat) -> dict[str, float]:
    """Return an actor's numbers, or none when it does not answer: it may be dying."""
    try:
        async with asyncio.timeout(5.0):
            numbers: dict[str, float] = await seat.handle.stats.remote()
            return numbers
    except Exception:  # noqa: BLE001 - who watches it will say why
        return {}
