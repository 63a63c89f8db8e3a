"""A pool of replicas on Ray: starts them, watches over them, and tells their clients who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from attrs import define, field

from turnwise.config_runtime import RayConfig
from turnwise.runtime.cluster import Cluster, first_answer, ping
from turnwise.runtime.group_weights import GroupWeights
from turnwise.runtime.placement import PoolPlacement
from turnwise.runtime.pool_client import Peer
from turnwise.runtime.ray_actors import Blueprint, ReplicaActor
from turnwise.runtime.ray_placement import ReplicaPlaces
from turnwise.runtime.supervision import Seat, live, seats_of
from turnwise.types import Capabilities


@define(eq=False)
class ReplicaGroup:
    """
    The replicas of one model.

    Attributes:
        blueprint: what a replica builds its engine from.
        pool: how many, and what each reserves.
        options: how long to wait.
        cluster: where they run.
        clients: who uses them: the seats of workers and reward workers.
        seats: of the replicas.
        weights: what they serve, and whether they sleep; None for a pool whose weights never change.
        capabilities: of the replicas, which are all alike; known when one has started.
    """

    blueprint: Blueprint
    pool: PoolPlacement
    options: RayConfig
    cluster: Cluster
    clients: Callable[[], list[Seat]]
    weights: GroupWeights | None = None
    seats: list[Seat] = field(init=False)
    capabilities: Capabilities = field(factory=Capabilities, init=False)
    _places: ReplicaPlaces = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with empty seats."""
        kind = "replica" if self.pool.name == "policy" else f"{self.pool.name} replica"
        self.seats = seats_of(kind, self.pool.num_replicas)
        self._places = ReplicaPlaces(self.pool, self.cluster.run_name)

    @property
    def peer(self) -> Peer:
        """What a client must know to use the replicas."""
        return Peer(self.capabilities, self.pool.num_replicas, self.options.coalesce_s)

    async def start(self, seat: Seat) -> Any:
        """Start a replica and make it known to every client."""
        if self.weights is not None:
            await self.weights.until_awake()
        options = await self._places.actor_options(seat.index, self.options.start_timeout_s)
        actor = self.cluster.actor(ReplicaActor, seat, **options)
        handle = actor.remote(self.blueprint, self.pool.max_in_flight, self.options.coalesce_s, self.pool.name)
        self.capabilities = await first_answer(handle, handle.start.remote(), self.options.start_timeout_s)
        watch = handle.watch.remote()

        def enter() -> None:
            seat.handle = handle
            for client in live(self.clients()):
                self._introduce(client, seat)

        if self.weights is None:
            enter()
            return watch
        try:
            await self.weights.join(seat.index, handle, enter)
        except BaseException:
            self.cluster.kill(handle)
            raise
        return watch

    def end(self, seat: Seat, reason: str) -> None:
        """End a replica that must not serve any more; its keeper starts it again."""
        log = structlog.get_logger()
        log.warning("replica ended", actor=seat.name, reason=reason)
        if seat.handle is not None:
            self.cluster.kill(seat.handle)

    async def attend(self, seat: Seat, watch: Any) -> None:
        """Ping a replica until it dies or does not answer."""
        async with asyncio.TaskGroup() as group:
            pings = group.create_task(ping(seat, self.options))
            await watch
            pings.cancel()

    def vacate(self, seat: Seat) -> None:
        """End a replica and tell every client."""
        handle, seat.handle = seat.handle, None
        if handle is None:
            return
        self.cluster.kill(handle)
        for client in live(self.clients()):
            text = f"{seat.name}: {seat.lost}"
            client.handle.replica_down.options(num_returns=0).remote(seat.index, text, self.pool.name)

    def give_up(self, seat: Seat) -> None:
        """Tell the clients when nobody is left."""
        if all(each.given_up for each in self.seats):
            for client in live(self.clients()):
                text = f"{seat.name}: {seat.lost}"
                client.handle.no_more_replicas.options(num_returns=0).remote(text, self.pool.name)

    async def close(self) -> None:
        """Give the devices back."""
        await self._places.close()

    def welcome(self, client: Seat) -> None:
        """Make every replica known to a new client."""
        for replica in live(self.seats):
            self._introduce(client, replica)

    def forget(self, client: Seat) -> None:
        """Let the replicas forget a client that has died."""
        for replica in live(self.seats):
            replica.handle.disconnect.options(num_returns=0).remote(client.name)

    def _introduce(self, client: Seat, replica: Seat) -> None:
        # The replica knows the client before it can hear from it: calls of one caller keep their order.
        replica.handle.connect.options(num_returns=0).remote(client.name, client.handle, replica.index)
        client.handle.replica_up.options(num_returns=0).remote(replica.index, replica.handle, self.pool.name)
