"""The reward workers of a run on Ray: starts them, watches over them, and tells the workers who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from turnwise.config_runtime import RuntimeConfig
from turnwise.runtime.cluster import Cluster, first_answer, ping
from turnwise.runtime.ray_actors import Blueprint
from turnwise.runtime.replica_group import ReplicaGroup
from turnwise.runtime.reward_actor import RewardActor
from turnwise.runtime.supervision import Seat, live, seats_of


@define(eq=False)
class RewardGroup:
    """
    What scores episodes outside of the workers.

    Attributes:
        blueprint: what a reward worker builds its reward from.
        config: how many.
        cluster: where they run.
        pools: the replicas that a reward may ask, by name: those of the judge.
        clients: who uses them: the seats of workers.
        seats: of the reward workers.
    """

    blueprint: Blueprint
    config: RuntimeConfig
    cluster: Cluster
    pools: Mapping[str, ReplicaGroup]
    clients: Callable[[], list[Seat]]
    seats: list[Seat] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with empty seats."""
        self.seats = seats_of("reward worker", self.config.reward_workers)

    async def start(self, seat: Seat) -> Any:
        """Start a reward worker and make it known to every worker."""
        actor = self.cluster.actor(RewardActor, seat, num_cpus=self.config.ray.worker_cpus)
        handle = actor.remote(seat.name, self.blueprint, {name: pool.peer for name, pool in self.pools.items()})
        await first_answer(handle, handle.stats.remote(), self.config.ray.start_timeout_s)
        watch = handle.watch.remote()
        seat.handle = handle
        for pool in self.pools.values():
            pool.welcome(seat)
        for client in live(self.clients()):
            self._introduce(client, seat)
        return watch

    async def attend(self, seat: Seat, watch: Any) -> None:
        """Ping a reward worker until it dies or does not answer."""
        async with asyncio.TaskGroup() as group:
            pings = group.create_task(ping(seat, self.config.ray))
            await watch
            pings.cancel()

    def vacate(self, seat: Seat) -> None:
        """End a reward worker; what it was scoring is scored by others."""
        handle, seat.handle = seat.handle, None
        if handle is None:
            return
        self.cluster.kill(handle)
        for pool in self.pools.values():
            pool.forget(seat)
        for client in live(self.clients()):
            client.handle.reward_worker_down.options(num_returns=0).remote(seat.index)

    def give_up(self, seat: Seat) -> None:
        """Tell the workers when nobody is left."""
        if all(each.given_up for each in self.seats):
            for client in live(self.clients()):
                client.handle.no_more_reward_workers.options(num_returns=0).remote(f"{seat.name}: {seat.lost}")

    async def close(self) -> None:
        """Do nothing: a reward worker has nothing besides its actor."""

    def welcome(self, client: Seat) -> None:
        """Make every reward worker known to a new worker."""
        for seat in live(self.seats):
            self._introduce(client, seat)

    @staticmethod
    def _introduce(client: Seat, seat: Seat) -> None:
        client.handle.reward_worker_up.options(num_returns=0).remote(seat.index, seat.handle)
