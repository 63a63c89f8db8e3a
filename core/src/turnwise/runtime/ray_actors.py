"""
The two kinds of Ray actors: thin shells around `ReplicaServer` and `Worker`, which know nothing of Ray.

An actor builds its own parts from a blueprint; nothing that was built travels. Messages between them are posted and
not waited for; that a peer has died is told by the driver.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from attrs import evolve

from turnwise.episode_setup import EngineClient, EpisodeSpec
from turnwise.loop_watch import LoopWatch
from turnwise.memory import EngineMemory
from turnwise.observer import unix_s
from turnwise.protocols import Engine, ReplicaLoad, Reward, Router
from turnwise.result import EpisodeResult
from turnwise.runtime.pool_client import Peer, PoolClientActor
from turnwise.runtime.relay import Events, Relay
from turnwise.runtime.replica_server import ReplicaServer
from turnwise.runtime.result_wire import ToDriver, pack_episodes
from turnwise.runtime.reward_pool import RewardPool
from turnwise.runtime.wire import ToReplica, ToWorker
from turnwise.runtime.worker import Worker, WorkerParts, unstarted
from turnwise.types import Capabilities
from turnwise.weights import Offer, WeightTransport

_STARTS: Final = 16
"""Episodes that begin between two looks at what else there is to do."""

_PACED: Final = 64
"""Of the episodes submitted at once, how many of the last begin more slowly."""

_PASSES: Final = 8
"""Passes of the event loop between theirs; a message, a turn, its tools and the next request take about five."""


class Blueprint(Protocol):
    """What a process builds its parts from: plain data that pickles, and the same everywhere."""

    def make_engine(self) -> Engine:
        """Build the engine of a replica; it is not started."""

    def make_judge_engine(self) -> Engine:
        """Build the engine of a judge's replica; it is not started. Only called when a judge is configured."""

    def make_parts(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerParts:
        """Build what a worker is made of, around the replicas, and around those of the judge when there is one."""

    def make_reward(self, judge: EngineClient | None = None) -> Reward | None:
        """Build the reward of a reward worker. Only called when reward workers are configured."""

    def make_router(self) -> Router:
        """Build a worker's router."""

    def make_transport(self) -> WeightTransport:
        """Build the replica's end of what carries weights. Only called when there is one."""


class ReplicaActor:
    """One engine. All methods but the constructor run on the actor's event loop."""

    def __init__(self, blueprint: Blueprint, max_in_flight: int, coalesce_s: float, pool: str = "policy") -> None:
        self._engine = blueprint.make_engine() if pool == "policy" else blueprint.make_judge_engine()
        self._pool_name = pool
        self._server = ReplicaServer(self._engine, max_in_flight, coalesce_s)
        self._memory = EngineMemory(self._engine)
        self._blueprint = blueprint
        self._workers: dict[str, Any] = {}
        self._transport: WeightTransport | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> Capabilities:
        """Start the engine and say what it can do."""
        await self._engine.start()
        return self._engine.capabilities

    async def connect(self, worker: str, handle: Any, index: int) -> None:
        """Send a worker its results from now on, as those of replica `index`."""
        deliver = handle.deliver.options(num_returns=0)
        pool = self._pool_name

        def post(message: ToWorker) -> None:
            deliver.remote(index, message, pool)

        self._server.connect(worker, post)
        self._workers[worker] = handle

    async def disconnect(self, worker: str) -> None:
        """Forget a worker."""
        self._server.disconnect(worker)
        self._workers.pop(worker, None)

    async def receive(self, worker: str, message: ToReplica) -> None:
        """Take a worker's message."""
        self._server.receive(worker, message, self._group)

    async def watch(self) -> None:
        """
        Own the tasks of this actor until it stops; called before anything is sent to it.

        That the call breaks, because the process died or a task failed, is how the driver notices.
        """
        async with asyncio.TaskGroup() as self._group:
            await self._stopped.wait()

    async def ping(self) -> ReplicaLoad:
        """Answer, and so show that the event loop runs."""
        return self._server.load

    async def apply_weights(self, offer: Offer) -> None:
        """Let the engine take a published version."""
        if self._transport is None:
            self._transport = self._blueprint.make_transport()
        await self._transport.apply(self._memory, offer)

    async def sleep(self, level: int) -> None:
        """Send workers elsewhere, then put the engine to sleep."""
        await self._announce(available=False)
        await self._memory.sleep(level)

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """Wake the engine, and take requests again when all of it is awake."""
        await self._memory.wake_up(tags)
        await self._announce(available=self._memory.level == 0)

    async def _announce(self, *, available: bool) -> None:
        """Return when the workers know: what the driver submits next must not meet what they knew before."""
        from ray.exceptions import RayError

        self._server.announce(available=available)
        for heard in [each.hear.remote() for each in self._workers.values()]:
            with suppress(RayError):  # one that has died needs to know nothing
                await heard

    async def stats(self) -> dict[str, float]:
        """Return the engine's numbers and what travelled."""
        traffic = {"bytes_in": float(self._server.bytes_in), "bytes_out": float(self._server.bytes_out)}
        return {**self._engine.stats(), **traffic, "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Stop the engine; what is in flight ends with `abort`."""
        if self._transport is not None:
            await self._transport.close()
        await self._engine.stop()
        self._stopped.set()


class WorkerActor(PoolClientActor):
    """One worker: takes specs as they are given and keeps what finished until it is collected."""

    def __init__(self, name: str, blueprint: Blueprint, peers: Mapping[str, Peer], reward_tries: int = 0) -> None:
        super().__init__(name, blueprint.make_router, peers)
        self._pool = self._pools["policy"]
        self._rewards = RewardPool(reward_tries) if reward_tries else None
        self._worker = Worker(self._parts(blueprint), name)
        self._waiting: dict[int, EpisodeSpec] = {}
        self._finished: list[tuple[int, EpisodeResult]] = []
        self._any_finished = asyncio.Event()
        self._stopped = asyncio.Event()
        self._slots = asyncio.Semaphore(self._worker.parts.max_in_flight)
        self._relay = Relay(self._any_finished.set)
        self._observers = self._worker.parts.observers
        self._pool.observe(self._observers, name)
        self._observers.open()

    async def watch(self) -> None:
        """Own the tasks of this actor until it stops, as `ReplicaActor.watch` does."""
        with LoopWatch(self._worker.parts.limits.loop_lag_s):
            async with asyncio.TaskGroup() as self._group:
                await self._stopped.wait()

    async def reward_worker_up(self, index: int, handle: Any) -> None:
        """Let a reward worker, new or restarted, score episodes."""
        if self._rewards is not None:
            self._rewards.up(index, handle.score.remote)

    async def reward_worker_down(self, index: int) -> None:
        """Stop using a reward worker; what it was scoring is scored elsewhere."""
        if self._rewards is not None:
            self._rewards.down(index)

    async def no_more_reward_workers(self, reason: str) -> None:
        """Wait for no reward worker any more."""
        if self._rewards is not None:
            self._rewards.give_up(reason)

    async def submit(self, specs: list[tuple[int, EpisodeSpec]]) -> None:
        """Run more episodes."""
        services = self._worker.services(self._group)
        self._waiting.update(specs)
        for count, (number, _spec) in enumerate(specs, 1):
            self._group.create_task(self._one(number, services))
            if count % _STARTS == 0:
                # What is answered meanwhile goes on, for the last of them far enough to ask for the next turn: else
                # many episodes keep in step, have their last answers at once, and the run waits until all are ended.
                for _ in range(_PASSES if len(specs) - count < _PACED else 1):
                    await asyncio.sleep(0)

    async def relay(self, names: frozenset[str]) -> None:
        """Let the driver hear these events of this process."""
        self._observers.add(self._relay.observer_of(names))

    async def ping(self) -> None:
        """Answer, and so show that the event loop runs."""

    async def clock(self) -> float:
        """Return Unix seconds on this process's clock."""
        return unix_s(time.perf_counter())

    async def collect(self, most: int = 256) -> tuple[ToDriver, Events]:
        """Wait until something has finished and return it, `most` at a time, with the events until now."""
        await self._any_finished.wait()
        taken, self._finished = self._finished[:most], self._finished[most:]
        if not self._finished:
            self._any_finished.clear()
        return pack_episodes(taken), self._relay.take()

    async def abort(self) -> None:
        """End soon what was submitted."""
        self._worker.abort()

    async def cut(self, numbers: list[int]) -> None:
        """End some episodes soon."""
        for number in numbers:
            if spec := self._waiting.pop(number, None):
                self._finish(number, unstarted(spec))
        self._worker.cut(frozenset(numbers))

    async def resume(self) -> None:
        """Take new episodes again after an abort."""
        self._worker.resume()

    async def stop(self) -> None:
        """Let `watch` return."""
        self._observers.close()
        self._stopped.set()

    async def stats(self) -> dict[str, float]:
        """Return what travelled and moved."""
        pool = self._pool
        return {"num_moves": pool.num_moves, "num_sent_tokens": pool.num_sent_tokens, "pid": os.getpid()}

    def _parts(self, blueprint: Blueprint) -> WorkerParts:
        judge = self._pools.get("judge")
        parts = blueprint.make_parts(self._pool) if judge is None else blueprint.make_parts(self._pool, judge)
        parts = evolve(parts, on_episode_end=self._pool.release)
        return parts if self._rewards is None else self._rewards.serve(parts)

    async def _one(self, number: int, services: Any) -> None:
        if self._slots.locked():
            self._worker.tell_of_full_slots()
        async with self._slots:
            if spec := self._waiting.pop(number, None):  # not when it was cut in the meantime
                self._finish(number, await self._worker.run_one(spec, services, number))

    def _finish(self, number: int, result: EpisodeResult) -> None:
        self._finished.append((number, result))
        self._any_finished.set()
