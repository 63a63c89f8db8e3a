"""
The Ray runtime: the driver's side of a run whose workers and replicas are actors.

A replica that dies or hangs is restarted, and its requests move to others (`turnwise.runtime.ray.replicas`). If a
worker dies, others run its unfinished episodes again (`turnwise.runtime.ray.workers`).
`turnwise.runtime.remote.dispatch` tracks every episode until its delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from math import inf

import structlog
from attrs import define, evolve, field

from turnwise.config.runtime import RuntimeConfig
from turnwise.errors import ConfigError, EngineError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Wait
from turnwise.protocols.weights import UpdateReport
from turnwise.record.result import EpisodeResult
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.placement import RunPlacement, check_interpreters, plan_runtime_placement
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import DRIVER_CALL_S, STOP_S, ask, kill_actor, node_address, run_to_end, wait_for_stop
from turnwise.runtime.ray.cluster import Cluster, draining_nodes
from turnwise.runtime.ray.placement_groups import check_capacity
from turnwise.runtime.ray.replicas import ReplicaGroup
from turnwise.runtime.ray.reward_workers import RewardGroup
from turnwise.runtime.ray.waits import gather_actor_waits
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.ray.workers import WorkerGroup
from turnwise.runtime.remote.dispatch import EpisodeDispatcher
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.remote.supervision import (
    ActorGroup,
    ActorSlot,
    RestartPolicy,
    Supervisor,
    failure_reason,
    live,
    staying,
    wait_until_started,
)
from turnwise.runtime.service import DriverServices
from turnwise.runtime.worker import Deliver
from turnwise.types import Capabilities
from turnwise.weights.sources import Weights

_REPLY_S = 5.0
_RETRY_S = 0.2


@define(eq=False)
class RayRuntime:
    """Runs episodes on a Ray cluster. `pools` are the replicas by name: `policy`, and `judge` if there is one."""

    blueprint: Blueprint
    config: RuntimeConfig = field(factory=lambda: RuntimeConfig(name="ray"))
    observers: Observers = field(factory=Observers)
    placement: RunPlacement | None = None
    weights: GroupWeights = field(factory=GroupWeights)
    group_pool: RewardPool | None = None
    services: DriverServices = field(factory=DriverServices)
    dispatcher: EpisodeDispatcher = field(init=False)
    cluster: Cluster = field(init=False)
    pools: dict[str, ReplicaGroup] = field(init=False)
    workers: WorkerGroup = field(init=False)
    rewards: RewardGroup | None = field(default=None, init=False)
    _supervisor: Supervisor = field(init=False)
    _missing: dict[str, float] = field(factory=dict, init=False)
    _tasks: asyncio.TaskGroup = field(init=False)
    _resizing: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _supervision: asyncio.Task[None] | None = field(default=None, init=False)
    _growth: asyncio.Task[None] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.placement = self.placement or plan_runtime_placement(self.config)
        pools = self.placement.pools
        num_actors = sum(pool.num_replicas for pool in pools) + self.config.num_workers + self.config.reward_workers
        options = evolve(self.config.ray, heartbeat_s=max(self.config.ray.heartbeat_s, DRIVER_CALL_S * num_actors))
        self.config = evolve(self.config, ray=options)
        self.dispatcher = EpisodeDispatcher(options.max_kills)
        self.cluster = Cluster(options.address, options.trusted_network)
        self.pools = {
            pool.name: ReplicaGroup(self.blueprint, pool, options, self.cluster, partial(self._clients, pool.name))
            for pool in pools
        }
        self.policy.weights = self.weights
        judges = {name: pool for name, pool in self.pools.items() if name == "judge"}
        if self.config.reward_workers:
            self.rewards = RewardGroup(
                self.blueprint, self.config, self.cluster, judges, lambda: self.workers.slots, self.group_pool
            )
        self.workers = WorkerGroup(
            self.blueprint,
            self.config,
            self.cluster,
            self.pools,
            self.dispatcher,
            self.observers,
            self.rewards,
            self.services,
        )
        policy = RestartPolicy(
            max_restarts=options.max_restarts, max_starts=options.max_starts, backoff_s=options.backoff_s
        )
        self._supervisor = Supervisor(policy, self.observers)

    @property
    def _stages(self) -> tuple[tuple[ActorGroup, ...], ...]:
        """Groups in the order of their start: each uses the groups of earlier stages."""
        rewards = () if self.rewards is None else (self.rewards,)
        return tuple(self.pools.values()), rewards, (self.workers,)

    @property
    def policy(self) -> ReplicaGroup:
        """The replicas that sample episodes."""
        return self.pools["policy"]

    def _clients(self, pool: str) -> list[ActorSlot]:
        rewards = self.rewards.slots if self.rewards is not None and pool == "judge" else ()
        return [*self.workers.slots, *rewards]

    @property
    def _slots(self) -> list[ActorSlot]:
        return [slot for stage in self._stages for group in stage for slot in group.slots]

    @property
    def capabilities(self) -> Capabilities:
        return self.policy.capabilities

    async def start(self) -> None:
        """Connect to the cluster and start every actor; errors with the reason if one does not start."""
        assert self.placement is not None  # __attrs_post_init__ has made it
        # Before Ray starts, which takes seconds, and long before an actor fails.
        check_interpreters(self.placement)
        await self.cluster.connect()
        if not self.config.ray.autoscaling:
            check_capacity(self.placement, await self.cluster.nodes())
        self.services.host = node_address()
        await self.services.open()  # before the workers, whose agents may call when they open their servers
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())
        await self._unless_ray_dies(wait_until_started(self._slots))

    async def run(self, feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event | None = None) -> None:
        # Set while every submitted episode is delivered, in whatever way it ended.
        idle, num_left = asyncio.Event(), 0

        def emit_and_deliver(number: int, result: EpisodeResult) -> None:
            nonlocal num_left
            self.observers.emit("on_episode_finished", result)
            deliver(number, result)
            num_left -= 1
            if num_left == 0:
                idle.set()

        async def run_all() -> None:
            nonlocal num_left
            async with asyncio.TaskGroup() as waiting:
                interrupting = (
                    waiting.create_task(self._interrupt_at(interrupt, emit_and_deliver)) if interrupt else None
                )
                while (first := await feed.take()) is not None:
                    numbered = [first, *iter(feed.take_waiting, None)]
                    num_left += len(numbered)
                    idle.clear()
                    self.dispatcher.submit(numbered, emit_and_deliver)
                    self.workers.distribute()
                if num_left:
                    await idle.wait()
                # The event may never be set, and the group would wait for it.
                if interrupting:
                    interrupting.cancel()

        await self._unless_ray_dies(run_all())

    async def _unless_ray_dies(self, work: Coroutine[object, object, None]) -> None:
        """Wait for some work, or raise the `EngineError` of `_watch_ray` if that comes first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_ray())
                await work
                watching.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # a group has one task, so it is this one's error or the work's

    async def _watch_ray(self) -> None:
        """Raise `EngineError` when Ray has lost a part: a minute later, its C++ code would end this process."""
        while True:
            await asyncio.sleep(self.config.ray.heartbeat_s)
            self.cluster.check_parts()

    async def _interrupt_at(self, interrupt: asyncio.Event, deliver: Deliver) -> None:
        await interrupt.wait()
        self.workers.interrupt(self.dispatcher.keys_of(deliver))

    async def abort(self) -> None:
        self.workers.abort()

    async def resize(self, num_replicas: int) -> None:
        if self._growth is not None:
            self._growth.cancel()
        # To its end, also if the caller is interrupted: a replica that has left half way serves no one.
        await asyncio.shield(self._resize(num_replicas))

    async def _grow(self, most: int) -> None:
        """Add replicas up to a number, each when the cluster has room for it."""
        while (index := len(self.policy.slots)) < most:
            try:
                await self.policy.placement_groups.actor_options(index, inf)  # reserves them, at any later time
                await self.weights.wait_until_awake()
                await asyncio.shield(self._resize(index + 1))
            except Exception as error:  # noqa: BLE001 - the run continues with its present replicas
                structlog.get_logger().warning("no further replica", reason=failure_reason(error))
                await asyncio.sleep(self.config.ray.start_timeout_s)

    async def _resize(self, num_replicas: int) -> None:
        async with self._resizing:
            slots, old = self.policy.slots, len(self.policy.slots)
            if num_replicas > old and self.weights.sleep_state.level:
                raise EngineError("the replicas sleep: wake them up before you start more")
            for index in range(old, num_replicas):
                slots.append(ActorSlot("replica", index))
                self._supervise_slot(self.policy, slots[index])
            try:
                await wait_until_started(slots[old:])
            except (ConfigError, EngineError):
                await self.policy.remove_from(old)
                raise
            await self.policy.remove_from(num_replicas)

    async def locate_replicas(self) -> list[tuple[str, list[str]]]:
        """
        Return the node and the GPUs of each replica of the policy, in their order.

        Raises:
            EngineError: a replica was given up.
        """
        return [await self._locate(slot) for slot in self.policy.slots]

    async def _locate(self, slot: ActorSlot) -> tuple[str, list[str]]:
        # A replica that dies meanwhile is waited for: a caller that got fewer would place its own actors wrongly.
        while not slot.given_up:
            with suppress(Exception):
                located: tuple[str, list[str]] = await slot.handle.locate.remote()
                return located
            await asyncio.sleep(_RETRY_S)
        raise EngineError(f"{slot.name} has no place: {slot.last_error}")

    async def update_weights(self, weights: Weights, version: int) -> UpdateReport:
        return await self.weights.update(self.policy.slots, weights, version, self.policy.kill_replica)

    async def sleep(self, level: int) -> None:
        await self.weights.sleep(self.policy.slots, level, self.policy.capabilities.sleep_levels)

    async def wake_up(self, tags: Sequence[str]) -> None:
        await self.weights.wake_up(self.policy.slots, tags)

    async def memory_bytes(self) -> int:
        # Without the replicas that die meanwhile: their supervision handles their death, and not the caller.
        numbers = [await ask(slot, "stats", _REPLY_S) for slot in live(self.policy.slots)]
        return int(sum(each.get("memory_bytes", 0) for each in numbers))

    async def counts(self) -> dict[str, int]:
        workers = [await ask(slot, "stats", _REPLY_S) for slot in live(self.workers.slots)]
        replicas = [await ask(slot, "stats", _REPLY_S) for slot in live(self.policy.slots)]
        return {
            "retried": self.dispatcher.num_retried,
            "quarantined": self.dispatcher.num_quarantined,
            "worker_restarts": sum(max(0, slot.num_starts - 1) for slot in self.workers.slots),
            "replica_restarts": sum(max(0, slot.num_starts - 1) for slot in self.policy.slots),
            "migrations": int(sum(numbers.get("num_migrations", 0) for numbers in workers)),
            "resent": int(sum(numbers.get("num_resent", 0) for numbers in workers)),
            "picture_bytes": int(sum(numbers.get("picture_bytes_in", 0) for numbers in (*workers, *replicas))),
        }

    async def waits(self) -> list[Wait]:
        if self._supervisor.stopping:  # a call of an actor would start Ray again when it has ended
            return []
        return await gather_actor_waits(self._slots, self.workers, self._missing)

    async def addresses(self) -> dict[str, dict[str, str]]:
        start_s = self.config.ray.start_timeout_s  # it may still start its servers
        found = {"driver": dict(self.services.addresses)}
        found |= {slot.name: await ask(slot, "addresses", start_s) for slot in live(self.workers.slots)}
        return {name: addresses for name, addresses in found.items() if addresses}

    async def stop(self) -> None:
        """Stop every actor, and the cluster if it was started here. Idempotent."""
        # From here on the supervisor neither releases nor restarts an actor, so slots keep their handles in these
        # loops.
        self._supervisor.stopping = True
        try:
            # Workers first: while they end their episodes, they still use replicas and reward workers.
            for slot in reversed(self._slots):
                if (handle := slot.handle) is not None:  # an actor may die while another one stops
                    await wait_for_stop(handle.stop.remote(), STOP_S)
            await self.services.close()
        finally:  # also after an interrupt: this process must not end while Ray runs
            await run_to_end(self._end())

    async def _end(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision], timeout=STOP_S)
            self._supervision = None
        await self.weights.close()
        # After the supervision has ended: it would take a kill for a loss. Ray's logs have the reason of a lost actor.
        await self.cluster.close(self._release, keep_files=any(slot.last_error for slot in self._slots))
        for slot in self._slots:
            slot.handle = None

    def _release(self) -> None:
        """Kill the actors and free their resources, in any thread: Ray blocks for parts of it that have stopped."""
        for slot in live(self._slots):
            kill_actor(slot)
        for pool in self.pools.values():
            pool.placement_groups.remove_all()

    async def stats(self) -> list[dict[str, float]]:
        """Return the statistics of every replica, then of every reward worker and worker."""
        return [await ask(slot, "stats", _REPLY_S) for slot in live(self._slots)]

    async def _supervise(self) -> None:
        """Start the stages one after the other, and supervise all actors."""
        async with asyncio.TaskGroup() as self._tasks:
            for stage in self._stages:
                slots = [(group, slot) for group in stage for slot in group.slots]
                for group, slot in slots:
                    self._supervise_slot(group, slot)
                # The next stage gets descriptions of these actors. A slot that was given up is settled too: `start`
                # raises.
                for _group, slot in slots:
                    await slot.settled.wait()
            self._growth = self._tasks.create_task(self._grow(self.policy.pool.max_replicas or 0))
            while True:
                await asyncio.sleep(self.config.ray.heartbeat_s)
                try:
                    await self._leave_draining_nodes()
                except Exception as error:  # noqa: BLE001 - the GCS may restart; the notice is found at the next look
                    structlog.get_logger().warning("no drain notices", reason=failure_reason(error))

    async def _leave_draining_nodes(self) -> None:
        """Move the actors from nodes that Ray will remove, if another node is left."""
        draining, now = await draining_nodes(), asyncio.get_running_loop().time()
        if not draining or all(node["NodeID"] in draining for node in await self.cluster.nodes() if node["Alive"]):
            return
        groups = [group for stage in self._stages for group in stage]
        for owner, slot in [(group, slot) for group in groups for slot in staying(group.slots)]:
            with suppress(Exception):  # a dead actor does not answer
                nodes = {(await slot.handle.locate.remote())[0]}
                if isinstance(owner, ReplicaGroup):  # a large replica has several
                    nodes |= await owner.placement_groups.nodes(slot.index)
                if slot.handle is not None and (by := [draining[node] for node in nodes if node in draining]):
                    # Half of the time is for the start of another actor.
                    slot.leave("Ray removes its node", now + (min(by) - now) / 2)

    def _supervise_slot(self, group: ActorGroup, slot: ActorSlot) -> None:
        slot.supervision = self._tasks.create_task(self._supervisor.supervise(group, slot))
