"""The reward workers of a run on Ray: starts and watches the actors, and tells the workers which of them are live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from attrs import define, field

from turnwise.config.runtime import RuntimeConfig
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import first_reply, kill_actor, watch_with_pings
from turnwise.runtime.ray.cluster import Cluster
from turnwise.runtime.ray.placement_groups import spread_options, wait_until_built
from turnwise.runtime.ray.replicas import ReplicaGroup
from turnwise.runtime.ray.reward_actor import RewardActor
from turnwise.runtime.remote.actor_calls import OrderedCalls
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.remote.supervision import ActorSlot, all_given_up, live, make_slots, staying


@define(eq=False)
class RewardGroup:
    """Actors that score episodes for their `clients`, the workers, and groups for the driver."""

    blueprint: Blueprint
    config: RuntimeConfig
    cluster: Cluster
    pools: Mapping[str, ReplicaGroup]
    clients: Callable[[], list[ActorSlot]]
    driver: RewardPool | None = None
    slots: list[ActorSlot] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.slots = make_slots("reward worker", self.config.reward_workers)

    async def start(self, slot: ActorSlot) -> Awaitable[object]:
        """Start a reward worker and connect it to the judge's replicas and to every worker."""
        options, timeout_s = spread_options(self.config.ray.worker_resources), self.config.ray.start_timeout_s
        pools = {name: pool.spec for name, pool in self.pools.items()}
        arguments = (slot.name, self.blueprint, pools, self.driver is not None)
        handle = await self.cluster.start_actor(RewardActor, slot, options, *arguments, timeout_s=timeout_s)
        await wait_until_built(handle, slot, self.config.ray.worker_resources, timeout_s)
        await first_reply(handle, handle.stats.remote(), timeout_s)
        calls = OrderedCalls()
        watch = calls.ask(handle.watch)
        # No await from here on, for the reason given in `ReplicaGroup.start`.
        slot.handle, slot.calls = handle, calls
        for pool in self.pools.values():
            pool.connect_client(slot)
        for client in live(self.clients()):
            self._connect(client, slot)
        if self.driver is not None:
            self.driver.worker_up(slot.index, handle.score_group.remote)
        return watch

    async def watch_actor(self, slot: ActorSlot, watch: Awaitable[object]) -> None:
        await watch_with_pings(slot, watch, self.config.ray, self.finish)

    async def finish(self, slot: ActorSlot) -> None:
        """Wait until a leaving reward worker has no episode; it gets no others."""
        self._disconnect(slot)
        await slot.handle.finish.remote()

    def release(self, slot: ActorSlot) -> None:
        """Kill a reward worker, and let the workers request its pending scores from others."""
        if kill_actor(slot):
            self._disconnect(slot)

    def _disconnect(self, slot: ActorSlot) -> None:
        for client in live(self.clients()):
            client.calls.post(client.handle.reward_worker_down, slot.index)
        if self.driver is not None:
            self.driver.worker_down(slot.index)

    async def give_up(self, slot: ActorSlot) -> None:
        """Let the workers fail their scores if no reward worker is left."""
        if all_given_up(self.slots):
            for client in live(self.clients()):
                reason = f"{slot.name}: {slot.last_error}"
                client.calls.post(client.handle.no_more_reward_workers, reason)
            if self.driver is not None:
                self.driver.give_up(f"{slot.name}: {slot.last_error}")

    def connect_client(self, client: ActorSlot) -> None:
        """Connect a new worker to every reward worker."""
        for slot in staying(self.slots):
            self._connect(client, slot)

    @staticmethod
    def _connect(client: ActorSlot, slot: ActorSlot) -> None:
        client.calls.post(client.handle.reward_worker_up, slot.index, slot.handle)
