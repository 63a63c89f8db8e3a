"""
The two kinds of Ray actors: thin shells around `ReplicaServer` and `Worker`, which know nothing of Ray.

An actor builds its own parts from a blueprint; nothing that was built travels. Messages between them are posted and
not waited for; that a peer has died is told by the driver.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol

from attrs import evolve

from turnwise.episode_setup import EngineClient, EpisodeSpec
from turnwise.protocols import Engine, ReplicaLoad, Router
from turnwise.result import EpisodeResult
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.replica_server import ReplicaServer
from turnwise.runtime.wire import ToReplica, ToWorker
from turnwise.runtime.worker import Worker, WorkerParts
from turnwise.types import Capabilities


class Blueprint(Protocol):
    """What a process builds its parts from: plain data that pickles, and the same everywhere."""

    def make_engine(self) -> Engine:
        """Build the engine of a replica; it is not started."""

    def make_parts(self, engine: EngineClient) -> WorkerParts:
        """Build what a worker is made of, around the replicas."""

    def make_router(self) -> Router:
        """Build a worker's router."""


class ReplicaActor:
    """One engine. All methods but the constructor run on the actor's event loop."""

    def __init__(self, blueprint: Blueprint, max_in_flight: int) -> None:
        self._engine = blueprint.make_engine()
        self._server = ReplicaServer(self._engine, max_in_flight)
        self._stopped = asyncio.Event()

    async def start(self) -> Capabilities:
        """Start the engine and say what it can do."""
        await self._engine.start()
        return self._engine.capabilities

    async def connect(self, worker: str, handle: Any, index: int) -> None:
        """Send a worker its results from now on, as those of replica `index`."""
        deliver = handle.deliver.options(num_returns=0)

        def post(message: ToWorker) -> None:
            deliver.remote(index, message)

        self._server.connect(worker, post)

    async def disconnect(self, worker: str) -> None:
        """Forget a worker."""
        self._server.disconnect(worker)

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

    async def stats(self) -> dict[str, float]:
        """Return the engine's numbers and what travelled."""
        traffic = {"bytes_in": float(self._server.bytes_in), "bytes_out": float(self._server.bytes_out)}
        return {**self._engine.stats(), **traffic, "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Stop the engine; what is in flight ends with `abort`."""
        await self._engine.stop()
        self._stopped.set()


class WorkerActor:
    """One worker: takes specs as they are given and keeps what finished until it is collected."""

    def __init__(self, name: str, blueprint: Blueprint, capabilities: Capabilities, num_replicas: int) -> None:
        self._name = name
        self._pool = ReplicaPool(blueprint.make_router(), capabilities, num_replicas)
        self._worker = Worker(evolve(blueprint.make_parts(self._pool), on_episode_end=self._pool.release))
        self._finished: list[tuple[int, EpisodeResult]] = []
        self._any_finished = asyncio.Event()
        self._stopped = asyncio.Event()
        self._slots = asyncio.Semaphore(self._worker.parts.max_in_flight)

    async def watch(self) -> None:
        """Own the tasks of this actor until it stops, as `ReplicaActor.watch` does."""
        async with asyncio.TaskGroup() as self._group:
            await self._stopped.wait()

    async def replica_up(self, index: int, handle: Any) -> None:
        """Use a replica, new or restarted."""
        receive = handle.receive.options(num_returns=0)

        def send(message: ToReplica) -> None:
            receive.remote(self._name, message)

        self._pool.replica_up(index, send)

    async def replica_down(self, index: int, reason: str) -> None:
        """Stop using a replica."""
        self._pool.replica_down(index, reason)

    async def no_more_replicas(self, reason: str) -> None:
        """Wait for no replica any more: none will be restarted."""
        self._pool.give_up(reason)

    async def deliver(self, index: int, message: ToWorker) -> None:
        """Take a replica's message."""
        self._pool.receive(index, message)

    async def submit(self, specs: list[tuple[int, EpisodeSpec]]) -> None:
        """Run more episodes."""
        services = self._worker.services(self._group)
        for number, spec in specs:
            self._group.create_task(self._one(number, spec, services))

    async def collect(self, most: int = 256) -> list[tuple[int, EpisodeResult]]:
        """Wait until something has finished and return it, `most` at a time."""
        await self._any_finished.wait()
        taken, self._finished = self._finished[:most], self._finished[most:]
        if not self._finished:
            self._any_finished.clear()
        return taken

    async def abort(self) -> None:
        """End soon what was submitted."""
        self._worker.abort()

    async def resume(self) -> None:
        """Take new episodes again after an abort."""
        self._worker.resume()

    async def stop(self) -> None:
        """Let `watch` return."""
        self._stopped.set()

    async def stats(self) -> dict[str, float]:
        """Return what travelled and moved."""
        pool = self._pool
        return {"num_moves": pool.num_moves, "num_sent_tokens": pool.num_sent_tokens, "pid": os.getpid()}

    async def _one(self, number: int, spec: EpisodeSpec, services: Any) -> None:
        async with self._slots:
            result = await self._worker.run_one(spec, services)
        self._finished.append((number, result))
        self._any_finished.set()
