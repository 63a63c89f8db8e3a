"""The workers of a run on Ray: starts and watches the actors, submits episodes and collects their results."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from attrs import define, field

from turnwise.config.runtime import RuntimeConfig
from turnwise.events.dispatch import Observers
from turnwise.events.observer import EpisodesRetried
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import DRIVER_CALL_S, first_reply, kill_actor, watch_with_pings
from turnwise.runtime.ray.cluster import Cluster
from turnwise.runtime.ray.placement_groups import spread_options, wait_until_built
from turnwise.runtime.ray.replicas import ReplicaGroup
from turnwise.runtime.ray.reward_workers import RewardGroup
from turnwise.runtime.ray.worker_actor import WorkerActor
from turnwise.runtime.remote.actor_calls import ActorHandle, OrderedCalls, post
from turnwise.runtime.remote.dispatch import EpisodeDispatcher
from turnwise.runtime.remote.event_forwarding import DRIVER_EVENTS, measure_clock_offset_s, shift_event
from turnwise.runtime.remote.picture_packets import Packet, PacketReceiver, PacketSender, show_pictures
from turnwise.runtime.remote.replica_pool import PoisonedRequestError
from turnwise.runtime.remote.result_wire import unpack_episodes
from turnwise.runtime.remote.supervision import ActorSlot, all_given_up, live, make_slots, staying
from turnwise.runtime.service import DriverServices
from turnwise.runtime.worker import emit_retried


@define(eq=False)
class WorkerGroup:
    """Actors that run the episodes. `pools` are their replicas by name, `rewards` the reward workers, if any."""

    blueprint: Blueprint
    config: RuntimeConfig
    cluster: Cluster
    pools: Mapping[str, ReplicaGroup]
    dispatcher: EpisodeDispatcher
    observers: Observers = field(factory=Observers)
    rewards: RewardGroup | None = None
    services: DriverServices = field(factory=DriverServices)
    slots: list[ActorSlot] = field(init=False)
    _max_in_flight: dict[int, int] = field(factory=dict, init=False)
    _clock_offsets_s: dict[int, float] = field(factory=dict, init=False)
    # Set while a worker has not answered since the last loss of another.
    _unverified: dict[int, asyncio.Event] = field(factory=lambda: defaultdict(asyncio.Event), init=False)
    _collected: dict[int, asyncio.Event] = field(factory=lambda: defaultdict(asyncio.Event), init=False)
    _serving: dict[int, asyncio.Task[NoReturn]] = field(factory=dict, init=False)
    _senders: dict[int, PacketSender] = field(factory=dict, init=False)
    _num_losses: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.slots = make_slots("worker", self.config.num_workers)

    async def start(self, slot: ActorSlot) -> Awaitable[object]:
        """Start a worker, connect it to replicas and reward workers, and submit episodes to it."""
        options, timeout_s = spread_options(self.config.ray.worker_resources), self.config.ray.start_timeout_s
        pools = {name: pool.spec for name, pool in self.pools.items()}
        reward_tries = 0 if self.rewards is None else self.config.ray.reward_tries
        arguments = (slot.name, self.blueprint, pools, reward_tries, self.services.host)
        handle = await self.cluster.start_actor(WorkerActor, slot, options, *arguments, timeout_s=timeout_s)
        await wait_until_built(handle, slot, self.config.ray.worker_resources, timeout_s)
        self._unverified[slot.index].clear()
        self._serve_calls(slot, handle)
        self._max_in_flight[slot.index] = await first_reply(handle, handle.open.remote(), timeout_s)
        calls = OrderedCalls()
        watch = calls.ask(handle.watch)
        await self._forward_events(slot, handle)
        # No await from here on, for the reason given in `ReplicaGroup.start`. The episodes are submitted last: the
        # worker starts these calls in their order, so it knows its replicas before the first episode.
        slot.handle, slot.calls, self._senders[slot.index] = handle, calls, PacketSender()
        for pool in self.pools.values():
            pool.connect_client(slot)
        if self.rewards is not None:
            self.rewards.connect_client(slot)
        self.submit(slot)
        return watch

    async def watch_actor(self, slot: ActorSlot, watch: Awaitable[object]) -> None:
        options = self.config.ray
        loops = [self._collect(slot), self._verify(slot)]
        if self.services.services:
            loops.append(self._join_serving(slot))
        await watch_with_pings(slot, watch, options, self.finish, *loops)

    async def finish(self, slot: ActorSlot) -> None:
        """Wait until a leaving worker has no episode; it gets no others."""
        while self.dispatcher.count_held(slot.index):
            self._collected[slot.index].clear()
            await self._collected[slot.index].wait()

    def release(self, slot: ActorSlot) -> None:
        """Kill a worker, and run its undelivered episodes on others."""
        if not kill_actor(slot):
            return
        # `_collect` of this worker has ended, because `watch_actor` has. So no result of an episode can be delivered
        # after the episode was given to another worker.
        retried = self.dispatcher.num_retried
        max_started, moved = self._max_in_flight[slot.index], slot.leaving.is_set()
        if self.dispatcher.requeue(slot.index, slot.last_error, max_started, moved=moved):
            slot.restarts = 0  # an episode killed it; the worker itself may be healthy
        if count := self.dispatcher.num_retried - retried:
            event = EpisodesRetried(count=count, worker=slot.name, reason=slot.last_error)
            self.observers.emit("on_episodes_retried", event)
        # Another worker may have died with this one, for instance with their node. It must not get the episodes: each
        # death of a worker that holds an episode makes the episode more suspect.
        self._num_losses += 1
        for other in self.slots:
            self._unverified[other.index].set()

    async def give_up(self, slot: ActorSlot) -> None:
        """Fail every episode if no worker is left."""
        if all_given_up(self.slots):
            self.dispatcher.fail_all(f"every worker is dead, the last: {slot.last_error}")

    def distribute(self) -> None:
        """Share new episodes of the dispatcher evenly among the workers."""
        if all_given_up(self.slots):
            self.dispatcher.fail_all("every worker is dead")
        self._share()

    def abort(self) -> None:
        """End all episodes soon. If a worker dies meanwhile, its episodes do not run again."""
        self.interrupt(self.dispatcher.keys)
        for slot in live(self.slots):
            slot.calls.post(slot.handle.abort)

    def interrupt(self, keys: Sequence[int]) -> None:
        """End some episodes soon. Episodes that no worker holds are delivered at once."""
        held = self.dispatcher.interrupt(keys)
        for slot in live(self.slots):
            if numbers := held.get(slot.index):
                slot.calls.post(slot.handle.interrupt, numbers)

    def submit(self, slot: ActorSlot, limit: int | None = None) -> None:
        """Submit episodes to a worker until it holds `limit`, at most the window; none if it leaves or may be dead."""
        if slot.leaving.is_set() or self._unverified[slot.index].is_set():
            return
        window = self.config.ray.window
        if specs := self.dispatcher.acquire(slot.index, window if limit is None else min(limit, window)):
            shown = any(
                show_pictures(messages)
                for _number, spec in specs
                for messages in (spec.task.messages, spec.unfinished.messages if spec.unfinished else ())
            )
            slot.calls.post(slot.handle.submit, self._senders[slot.index].pack(specs) if shown else specs)

    def _share(self) -> None:
        # An even share for each: the first worker could otherwise fill its window with all episodes.
        workers = staying(self.slots)
        share = self.dispatcher.even_share([slot.index for slot in workers])
        for slot in workers:
            self.submit(slot, share)

    def _submit_elsewhere(self, slot: ActorSlot) -> None:
        """Submit what a worker has not finished to others, for as long as they have room."""
        for other in staying(self.slots):
            if other is not slot:
                self.submit(other)

    async def _verify(self, slot: ActorSlot) -> NoReturn:
        """Submit no episodes to a worker from the loss of another one until it has answered a ping."""
        while True:
            await self._unverified[slot.index].wait()
            num_losses = self._num_losses
            await slot.handle.ping.remote()
            if num_losses == self._num_losses:
                self._unverified[slot.index].clear()
                self._share()

    def _serve_calls(self, slot: ActorSlot, handle: ActorHandle) -> None:
        """Answer the calls of a worker's agents, which may come from the start of their servers on."""
        if self.services.services:
            serving = self.services.serve(handle.service_calls.remote, partial(post, handle.settle_service_call))
            self._serving[slot.index] = task = asyncio.get_running_loop().create_task(serving)
            # The death of the worker ends it with an error, which its start or `watch_actor` has already.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _join_serving(self, slot: ActorSlot) -> NoReturn:
        """Wait for the end of a worker's calls: only then may its episodes run elsewhere, and call too."""
        await self._serving[slot.index]

    async def _forward_events(self, slot: ActorSlot, handle: ActorHandle) -> None:
        """Let a worker forward the events that observers of the driver receive, and measure its clock."""
        self._clock_offsets_s[slot.index] = 0.0
        if names := self.observers.names() - DRIVER_EVENTS:
            # Before the first episode, whose events would be lost otherwise.
            await handle.forward_events.remote(names)
            self._clock_offsets_s[slot.index] = await measure_clock_offset_s(handle.clock.remote)

    async def _collect(self, slot: ActorSlot) -> NoReturn:
        # With many workers, an episode in each reply would take all the time of the driver.
        gap_s = max(self.config.ray.coalesce_s, DRIVER_CALL_S * len(self.slots))
        packets = PacketReceiver()
        while True:
            reply = await slot.handle.collect.remote(gap_s)
            message, events = packets.unpack(reply) if isinstance(reply, Packet) else reply
            for name, event in events:  # before the results: an episode's events precede its end
                self.observers.emit(name, shift_event(event, self._clock_offsets_s[slot.index]))
            for key, result in unpack_episodes(message):
                if result.fault and result.fault.kind == PoisonedRequestError.__name__:
                    for pool in self.pools.values():
                        pool.pardon()
                if self.dispatcher.complete(slot.index, key, result):
                    emit_retried(self.observers, result)
                    self._submit_elsewhere(slot)
            self._collected[slot.index].set()
            # Refill the window, with as many episodes as were collected.
            self.submit(slot)
