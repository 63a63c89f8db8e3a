"""A pool of replicas on Ray: starts and watches the actors, and tells their clients which replicas are live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial

import structlog
from attrs import define, field

from turnwise.config.runtime import RayConfig
from turnwise.errors import EngineError
from turnwise.runtime.placement import PoolPlacement
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import first_reply, kill, kill_actor, watch_with_pings
from turnwise.runtime.ray.cluster import Cluster
from turnwise.runtime.ray.placement_groups import PlacementGroups
from turnwise.runtime.ray.pool_client import PoolSpec
from turnwise.runtime.ray.replica_actor import ReplicaActor
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.actor_calls import OrderedCalls
from turnwise.runtime.remote.channel import ChannelAddress
from turnwise.runtime.remote.supervision import ActorSlot, all_given_up, live, make_slots, staying
from turnwise.types import Capabilities


@define(eq=False)
class ReplicaGroup:
    """
    The replicas of one model.

    Attributes:
        pool: number of replicas at the start, and the resources of each.
        clients: returns the slots of the actors that send requests: workers and reward workers.
        weights: version and sleep state; None for a pool whose weights never change.
        capabilities: of the replicas, which are identical; known when one has started.
        placement_groups: the reserved resources of the replicas, by their index.
    """

    blueprint: Blueprint
    pool: PoolPlacement
    options: RayConfig
    cluster: Cluster
    clients: Callable[[], list[ActorSlot]]
    weights: GroupWeights | None = None
    slots: list[ActorSlot] = field(init=False)
    # Until a replica has told them, none is refused pictures.
    capabilities: Capabilities = field(factory=partial(Capabilities, pictures=True), init=False)
    placement_groups: PlacementGroups = field(init=False)
    _addresses: dict[int, ChannelAddress] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        kind = "replica" if self.pool.name == "policy" else f"{self.pool.name} replica"
        self.slots = make_slots(kind, self.pool.num_replicas)
        self.placement_groups = PlacementGroups(self.pool, self.cluster.run_name)

    @property
    def spec(self) -> PoolSpec:
        """Description of the pool for its clients."""
        options = self.options
        return PoolSpec(self.capabilities, len(self.slots), options.coalesce_s, options.start_timeout_s)

    async def start(self, slot: ActorSlot) -> Awaitable[object]:
        """Start a replica and connect it to every client."""
        if self.weights is not None:
            await self.weights.wait_until_awake()
        timeout_s = self.options.start_timeout_s
        options = await self.placement_groups.actor_options(slot.index, timeout_s)
        arguments = (self.blueprint, self.pool.max_in_flight, self.options.coalesce_s, self.pool.name)
        handle = await self.cluster.start_actor(ReplicaActor, slot, options, *arguments, timeout_s=timeout_s)
        await first_reply(handle, handle.check_built.remote(), timeout_s)
        self.capabilities = await first_reply(handle, handle.start.remote(), timeout_s)
        calls = OrderedCalls()
        watch = calls.ask(handle.watch)
        self._addresses[slot.index] = await first_reply(handle, calls.ask(handle.listen), timeout_s)

        def enter_rotation() -> None:
            # No await between these lines: a client that starts later finds the handle in `connect_client`, and one
            # that started before is in `clients`. So every pair is connected exactly once.
            slot.handle, slot.calls = handle, calls
            for client in live(self.clients()):
                self._connect(client, [slot])

        if self.weights is None:
            enter_rotation()
            return watch
        try:
            await _while_alive(watch, self.weights.catch_up(slot, handle, enter_rotation))
        except BaseException:
            # The slot is still empty, so neither `release` nor the end of the run would find this actor.
            kill(handle)
            raise
        return watch

    def kill_replica(self, slot: ActorSlot, reason: str) -> None:
        """Kill a replica that must not serve any more; its supervision handles the loss, which blames no request."""
        structlog.get_logger().warning("replica killed", actor=slot.name, reason=reason)
        if slot.handle is not None:
            slot.killed = True
            kill(slot.handle)

    def pardon(self) -> None:
        """Forget deaths of replicas: the request that caused them was found and has failed."""
        for slot in self.slots:
            slot.restarts = 0
        for slot in live(self.slots):
            slot.calls.post(slot.handle.pardon)
        for client in live(self.clients()):
            client.calls.post(client.handle.pardon, self.pool.name)

    async def watch_actor(self, slot: ActorSlot, watch: Awaitable[object]) -> None:
        await watch_with_pings(slot, watch, self.options, self.finish)

    async def finish(self, slot: ActorSlot) -> None:
        """Wait until the requests of a leaving replica have ended."""
        clients, pool = live(self.clients()), self.pool.name
        for retired in [each.calls.ask(each.handle.retire_replica, slot.index, pool) for each in clients]:
            with suppress(Exception):  # a dead client has no requests
                await retired

    def release(self, slot: ActorSlot) -> None:
        """Kill a replica, and let every client repeat its requests on others."""
        if kill_actor(slot):
            reason, blameless = f"{slot.name}: {slot.last_error}", slot.leaving.is_set() or slot.killed
            slot.killed = False
            for client in live(self.clients()):
                client.calls.post(client.handle.replica_down, slot.index, reason, self.pool.name, blameless)

    async def give_up(self, slot: ActorSlot) -> None:
        """Let the clients fail their requests if no replica is left."""
        if all_given_up(self.slots):
            for client in live(self.clients()):
                reason = f"{slot.name}: {slot.last_error}"
                client.calls.post(client.handle.no_more_replicas, reason, self.pool.name)
        if self.weights is not None:
            await self.weights.notify_given_up()

    async def remove_from(self, first: int) -> None:
        """Retire the replicas from an index on, and free their resources."""
        retired = self.slots[first:]
        del self.slots[first:]  # so that none gets weights or a new client meanwhile
        for slot in retired:
            slot.retired = True
            slot.leave("it is retired")
            if slot.supervision is not None:
                if slot.handle is None:
                    slot.supervision.cancel()
                await asyncio.wait([slot.supervision])
        await self.placement_groups.close(first)

    def connect_client(self, client: ActorSlot) -> None:
        """Connect a new client to every replica."""
        self._connect(client, staying(self.slots))

    def _connect(self, client: ActorSlot, replicas: list[ActorSlot]) -> None:
        addresses = {replica.index: self._addresses[replica.index] for replica in replicas}
        client.calls.post(client.handle.replicas_up, addresses, self.pool.name)


async def _while_alive(watch: Awaitable[object], starting: Coroutine[object, object, None]) -> None:
    """Await a step of an actor's start; raise when the actor ends before, because the step may wait for ever then."""

    async def raise_at_end() -> None:
        await watch
        raise EngineError("it has ended before its start")

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(raise_at_end())
        await starting
        watching.cancel()
