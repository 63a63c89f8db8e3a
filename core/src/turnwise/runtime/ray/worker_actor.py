"""The Ray actor of a worker: many episodes on one event loop, around a `Worker` that does not depend on Ray."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from attrs import evolve

from turnwise.collector import full_collections_on_growth
from turnwise.episode.setup import EpisodeContext
from turnwise.events.observer import Wait, unix_s
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.loop_watchdog import EventLoopWatchdog
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import node_address
from turnwise.runtime.ray.pool_client import PoolClientActor, PoolSpec, keep_error
from turnwise.runtime.remote.actor_calls import ActorHandle, in_order
from turnwise.runtime.remote.actor_process import prepare_process
from turnwise.runtime.remote.event_forwarding import EventForwarder, Events
from turnwise.runtime.remote.picture_packets import Packet, PacketReceiver, PacketSender
from turnwise.runtime.remote.result_wire import ToDriver, has_pictures, pack_episodes
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.service import LOOPBACK, RemoteServices, ServiceCall, ServiceReply
from turnwise.runtime.worker import Worker, WorkerComponents, build_unstarted_result

_BATCH: Final = 16
"""Episodes that start before other tasks of the event loop run."""

_SLOW_TAIL: Final = 64
"""Number of the last episodes of a call that start without extra passes."""

_PASSES: Final = 8
"""Passes of the event loop between two batches. A message, a turn, its tools and the next request need about five."""


Numbered = list[tuple[int, EpisodeSpec]]
Collected = tuple[ToDriver, Events]


class WorkerActor(PoolClientActor):
    """
    One worker: runs the episodes that the driver submits, and keeps their results until the driver collects them.

    It builds its components from the blueprint. All methods but the constructor run on the actor's event loop.
    """

    @keep_error
    def __init__(
        self,
        name: str,
        blueprint: Blueprint,
        pools: Mapping[str, PoolSpec],
        reward_tries: int = 0,
        driver_host: str = LOOPBACK,
    ) -> None:
        super().__init__(name, blueprint.make_router, pools)
        self._pool = self._pools["policy"]
        self._rewards = RewardPool(reward_tries) if reward_tries else None
        self._services = RemoteServices(node_address(), driver_host)
        self._worker = Worker(self._build_components(blueprint), name)
        self._waiting: dict[int, EpisodeSpec] = {}
        self._finished: list[tuple[int, EpisodeResult]] = []
        self._any_finished = asyncio.Event()
        self._stopped = asyncio.Event()
        self._slots = asyncio.Semaphore(self._worker.parts.max_in_flight)
        self._in_slots: set[int] = set()
        self._submitting = asyncio.Lock()
        self._num_collected = 0
        self._num_running = 0
        self._collected_at = -math.inf
        self._tasks, self._results = PacketReceiver(), PacketSender()
        self._events = EventForwarder(self._any_finished.set)
        self._observers = self._worker.parts.observers
        self._pool.observe(self._observers, name)
        self._observers.open()

    async def open(self) -> int:
        """
        Open the servers of the agents, and return the most episodes at once.

        It is a part of the start, so that an error of a server ends the start as one of the constructor does.
        """
        prepare_process()
        await self.addresses()
        return self._worker.parts.max_in_flight

    @in_order
    async def watch(self) -> None:
        """Run the tasks of this actor until it stops, as `ReplicaActor.watch` does; called after `open`."""
        with EventLoopWatchdog(self._worker.parts.limits.loop_lag_s), full_collections_on_growth():
            async with asyncio.TaskGroup() as self._group:
                await self._stopped.wait()

    async def addresses(self) -> dict[str, str]:
        """Return the addresses of this worker's agents."""
        return await self._worker.parts.open_servers()

    async def service_calls(self) -> list[ServiceCall]:
        """Wait for calls of services in the driver, and return the new ones."""
        return await self._services.fetch()

    async def settle_service_call(self, reply: ServiceReply) -> None:
        self._services.settle(reply)

    @in_order
    async def reward_worker_up(self, index: int, handle: ActorHandle) -> None:
        if self._rewards is not None:
            self._rewards.worker_up(index, handle.score.remote)

    @in_order
    async def reward_worker_down(self, index: int) -> None:
        """Stop using a reward worker; its pending scores are requested from others."""
        if self._rewards is not None:
            self._rewards.worker_down(index)

    @in_order
    async def no_more_reward_workers(self, reason: str) -> None:
        """Fail scores at once: no reward worker will be restarted."""
        if self._rewards is not None:
            self._rewards.give_up(reason)

    @in_order
    async def submit(self, specs: Numbered | Packet[Numbered]) -> None:
        if isinstance(specs, Packet):
            specs = self._tasks.unpack(specs)
        self._worker.resume()  # an earlier run may have been aborted
        context = self._worker.build_context(self._group)
        # All of them before the first pass of the loop, so that `interrupt` also finds episodes without a task.
        self._waiting.update(specs)
        async with self._submitting:  # the driver relies on the order in which episodes start
            # Otherwise all of the first episodes would go to the replica whose channel opens first.
            await self._links["policy"].wait_until_opened()
            for count, (number, _spec) in enumerate(specs, 1):
                self._group.create_task(self._run_one(number, context))
                if count % _BATCH == 0:
                    # Let earlier episodes proceed to their next request before more start. Otherwise all episodes would
                    # be at the same turn, get their last results together, and end together after the engine is idle.
                    for _ in range(_PASSES if len(specs) - count < _SLOW_TAIL else 1):
                        await asyncio.sleep(0)

    async def forward_events(self, names: frozenset[str]) -> None:
        """Forward these events of this process to the driver."""
        self._observers.add(self._events.make_observer(names))

    async def ping(self) -> None:
        """Return. A reply shows that the event loop is not blocked."""

    async def clock(self) -> float:
        """Return Unix seconds on this process's clock."""
        return unix_s(time.perf_counter())

    async def collect(self, gap_s: float = 0.0, limit: int = 256) -> Collected | Packet[Collected]:
        """
        Wait for finished episodes or due events; return up to `limit` episodes, and all events so far.

        Replies are `gap_s` seconds apart, unless nothing runs any more or there are `limit` episodes.
        """
        # The driver has received the results of its previous call, and only now are their slots free. So if this
        # process dies, at most `max_in_flight` of the episodes that the driver misses had started: the oldest ones.
        for _ in range(self._num_collected):
            self._slots.release()
        self._num_collected = 0
        await self._any_finished.wait()
        await self._wait_for_more(gap_s, limit)
        self._collected_at = asyncio.get_running_loop().time()
        # At most `limit`, so that one message does not block the event loop for long. The driver collects again at
        # once.
        collected, self._finished = self._finished[:limit], self._finished[limit:]
        if self._finished:
            self._any_finished.set()
        else:
            self._any_finished.clear()
        numbers = self._in_slots.intersection(number for number, _result in collected)
        self._num_collected = len(numbers)
        self._in_slots -= numbers
        reply = pack_episodes(collected), self._events.drain()
        return self._results.pack(reply) if any(has_pictures(result) for _number, result in collected) else reply

    async def _wait_for_more(self, gap_s: float, limit: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._collected_at + gap_s):
                while self._num_running and len(self._finished) < limit:
                    self._any_finished.clear()
                    await self._any_finished.wait()

    @in_order
    async def abort(self) -> None:
        self._worker.abort()

    @in_order
    async def interrupt(self, numbers: list[int]) -> None:
        """End some episodes soon; episodes that wait for a slot are delivered unstarted."""
        for number in numbers:
            if spec := self._waiting.pop(number, None):
                self._finish(number, build_unstarted_result(spec))
        self._worker.interrupt(frozenset(numbers))

    async def stop(self) -> None:
        """Let `watch` return."""
        await self._worker.parts.kept.close()
        self._services.close()
        self._observers.close()
        self._stopped.set()

    async def waits(self) -> list[Wait]:
        return self._worker.waits()

    async def stats(self) -> dict[str, float]:
        """
        Return the most episodes at once, migrated requests, and the tokens and pictures sent to replicas.

        `packet_bytes_in` are the bytes of tasks with pictures, `picture_bytes_in` the bytes of these pictures.
        """
        pool = self._pool
        return {
            "max_in_flight": self._worker.parts.max_in_flight,
            "num_migrations": pool.num_migrations,
            "num_resent": pool.num_resent,
            "num_sent_tokens": pool.num_sent_tokens,
            "num_sent_pictures": pool.num_sent_pictures,
            "packet_bytes_in": self._tasks.bytes_in,
            "picture_bytes_in": self._tasks.picture_bytes_in,
            "pid": os.getpid(),
        }

    def _build_components(self, blueprint: Blueprint) -> WorkerComponents:
        components = blueprint.make_components(self._pool, self._pools.get("judge"))
        components = evolve(components, on_episode_end=self._pool.release, connect=self._services.client)
        return components if self._rewards is None else self._rewards.attach(components)

    async def _run_one(self, number: int, context: EpisodeContext) -> None:
        if self._slots.locked():
            self._worker.emit_limit_reached()
        await self._slots.acquire()
        # During the wait `interrupt` may have delivered the episode already.
        if spec := self._waiting.pop(number, None):
            self._in_slots.add(number)
            self._num_running += 1
            try:
                result = await self._worker.run_one(spec, context, number)
            finally:
                self._num_running -= 1
            self._finish(number, result)
        else:
            self._slots.release()

    def _finish(self, number: int, result: EpisodeResult) -> None:
        self._finished.append((number, result))
        self._any_finished.set()
