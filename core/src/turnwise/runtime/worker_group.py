"""The workers of a run on Ray: starts them, gives them episodes and takes back what has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from turnwise.config_runtime import RuntimeConfig
from turnwise.observer import EpisodesRetried
from turnwise.runtime.books import Books
from turnwise.runtime.cluster import Cluster, first_answer, ping
from turnwise.runtime.ray_actors import Blueprint, WorkerActor
from turnwise.runtime.relay import OWN_TO_THE_DRIVER, clock_offset_s, shifted
from turnwise.runtime.replica_group import ReplicaGroup
from turnwise.runtime.result_wire import unpack_episodes
from turnwise.runtime.reward_group import RewardGroup
from turnwise.runtime.supervision import Seat, live, seats_of
from turnwise.telemetry import Observers


@define(eq=False)
class WorkerGroup:
    """
    What drives the episodes.

    Attributes:
        blueprint: what a worker builds its parts from.
        config: how many, and how much each is given.
        cluster: where they run.
        pools: the replicas that they use, by name: `policy`, and `judge` when there is one.
        books: where every episode is.
        observers: who hears in the driver.
        rewards: the reward workers, when there are some.
        seats: of the workers.
    """

    blueprint: Blueprint
    config: RuntimeConfig
    cluster: Cluster
    pools: Mapping[str, ReplicaGroup]
    books: Books
    observers: Observers = field(factory=Observers)
    rewards: RewardGroup | None = None
    seats: list[Seat] = field(init=False)
    _offsets_s: dict[int, float] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with empty seats."""
        self.seats = seats_of("worker", self.config.num_workers)

    async def start(self, seat: Seat) -> Any:
        """Start a worker, make the replicas known to it and give it episodes."""
        actor = self.cluster.actor(WorkerActor, seat, num_cpus=self.config.ray.worker_cpus)
        peers = {name: pool.peer for name, pool in self.pools.items()}
        reward_tries = 0 if self.rewards is None else self.config.ray.reward_tries
        handle = actor.remote(seat.name, self.blueprint, peers, reward_tries)
        await first_answer(handle, handle.stats.remote(), self.config.ray.start_timeout_s)
        watch = handle.watch.remote()
        await self._listen(seat, handle)
        seat.handle = handle
        for pool in self.pools.values():
            pool.welcome(seat)
        if self.rewards is not None:
            self.rewards.welcome(seat)
        self.give(seat)
        return watch

    async def attend(self, seat: Seat, watch: Any) -> None:
        """Collect what a worker finishes, and ping it, until it dies or does not answer."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(each) for each in (self._collect(seat), ping(seat, self.config.ray))]
            await watch
            for task in beside:
                task.cancel()

    def vacate(self, seat: Seat) -> None:
        """End a worker; what it had not delivered is run by others."""
        handle, seat.handle = seat.handle, None
        if handle is None:
            return
        self.cluster.kill(handle)
        before, set_aside = self.books.num_retried, self.books.num_set_aside
        self.books.lose(seat.index, seat.lost)
        if self.books.num_set_aside > set_aside:
            seat.restarts = 0  # it was not the worker's fault
        if retried := self.books.num_retried - before:
            event = EpisodesRetried(count=retried, worker=seat.name, reason=seat.lost)
            self.observers.emit("on_episodes_retried", event)
        for pool in self.pools.values():
            pool.forget(seat)
        for other in live(self.seats):
            self.give(other)

    def give_up(self, seat: Seat) -> None:
        """Fail every episode when nobody is left who could run it."""
        if all(each.given_up for each in self.seats):
            self.books.fail_all(f"every worker is dead, the last: {seat.lost}")

    async def close(self) -> None:
        """Do nothing: a worker has nothing besides its actor."""

    def begin(self, count: int) -> None:
        """Share out episodes that are new in the books."""
        alive = live(self.seats)
        if not alive and all(seat.given_up for seat in self.seats):
            self.books.fail_all("every worker is dead")
        share = -(-count // max(1, len(alive)))
        for seat in alive:
            seat.handle.resume.options(num_returns=0).remote()
            self.give(seat, share)

    def abort(self) -> None:
        """Ask every worker to end soon; what one had that dies meanwhile is not run again."""
        self.cut(self.books.keys)
        for seat in live(self.seats):
            seat.handle.abort.options(num_returns=0).remote()

    def cut(self, keys: Sequence[int]) -> None:
        """Ask the workers to end some episodes soon; those that no worker has are delivered at once."""
        given = self.books.cut(keys)
        for seat in live(self.seats):
            if its := given.get(seat.index):
                seat.handle.cut.options(num_returns=0).remote(its)

    def give(self, seat: Seat, most: int | None = None) -> None:
        """Give a worker episodes, until it has `most`, and never more than the window."""
        window = self.config.ray.window
        if specs := self.books.take(seat.index, window if most is None else min(most, window)):
            seat.handle.submit.options(num_returns=0).remote(specs)

    async def _listen(self, seat: Seat, handle: Any) -> None:
        """Let a worker send the events that somebody here listens to, and find how far its clock is off."""
        self._offsets_s[seat.index] = 0.0
        if names := self.observers.names() - OWN_TO_THE_DRIVER:
            await handle.relay.remote(names)
            self._offsets_s[seat.index] = await clock_offset_s(handle.clock.remote)

    async def _collect(self, seat: Seat) -> None:
        while True:
            message, events = await seat.handle.collect.remote()
            for name, event in events:  # of these episodes, among others: they are heard before their end
                self.observers.emit(name, shifted(event, self._offsets_s[seat.index]))
            for key, result in unpack_episodes(message):
                self.books.finish(seat.index, key, result)
            self.give(seat)
