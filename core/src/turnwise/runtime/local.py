"""The local runtime: engine and workers in this process, on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from turnwise.errors import EngineError
from turnwise.events.observer import Wait
from turnwise.protocols import Engine
from turnwise.protocols.weights import ReplicaUpdate, UpdateReport, WeightSource
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.loop_watchdog import EventLoopWatchdog
from turnwise.runtime.service import DriverServices
from turnwise.runtime.worker import Deliver, Worker, WorkerComponents
from turnwise.types import Capabilities
from turnwise.weights.sleep import EngineMemory
from turnwise.weights.sources import Weights, source_of


@define(eq=False)
class LocalRuntime:
    """Runs episodes in this process. Its workers share the episodes, and results do not depend on their number."""

    engine: Engine
    parts: WorkerComponents
    num_workers: int = 1
    judge: Engine | None = None
    make_source: Callable[[Weights], WeightSource] = source_of
    services: DriverServices = field(factory=DriverServices)
    # In the order of their start, in which an abort ends them.
    _workers: list[Worker] = field(factory=list, init=False)
    _memory: EngineMemory = field(init=False)

    def __attrs_post_init__(self) -> None:
        # The only caller of the engine's sleep, wake-up and update: it keeps them from overlapping.
        self._memory = EngineMemory(self.engine)
        self.parts = evolve(self.parts, connect=self.services.client)

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def start(self) -> None:
        await self.engine.start()
        if self.judge is not None:
            await self.judge.start()
        await self.services.open()
        await self.parts.open_servers()

    async def run(self, feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event | None = None) -> None:
        # New workers for every call, so that an interrupt of one call does not touch the episodes of another.
        workers = [Worker(self.parts, f"worker {index}") for index in range(self.num_workers)]
        self._workers += workers
        try:
            with EventLoopWatchdog(self.parts.limits.loop_lag_s):
                await _run_all(workers, feed, deliver, interrupt)
        finally:
            self._workers[:] = [each for each in self._workers if each not in workers]

    async def abort(self) -> None:
        for worker in tuple(self._workers):
            worker.abort()

    async def resize(self, num_replicas: int) -> None:
        if num_replicas > 1:
            raise EngineError(f"the runtime local has one engine, not {num_replicas}; set runtime.name to ray")

    async def update_weights(self, weights: Weights, version: int) -> UpdateReport:
        """Pass the weights to the engine directly: one process needs no transport."""
        started, source = time.perf_counter(), self.make_source(weights)
        await self._memory.update_weights(source, version)
        seconds, specs = time.perf_counter() - started, source.specs
        return UpdateReport(
            version=version,
            seconds=seconds,
            num_tensors=len(specs),
            num_bytes=sum(spec.num_bytes for spec in specs),
            transport="direct",
            replicas=(ReplicaUpdate(replica=0, seconds=seconds),),
        )

    async def sleep(self, level: int) -> None:
        await self._memory.sleep(level)

    async def wake_up(self, tags: Sequence[str]) -> None:
        await self._memory.wake_up(tags)

    async def memory_bytes(self) -> int:
        return int(self.engine.stats().get("memory_bytes", 0))

    async def counts(self) -> dict[str, int]:
        """Return no counters: a failure of a part in this process ends the run."""
        return {}

    async def waits(self) -> list[Wait]:
        return [wait for worker in self._workers for wait in worker.waits()]

    async def addresses(self) -> dict[str, dict[str, str]]:
        """Return the addresses; all workers share the servers of this process."""
        found = {**self.services.addresses, **await self.parts.open_servers()}
        return {"local": found} if found else {}

    async def stop(self) -> None:
        try:  # a server or judge that fails to stop must not leave the engine with its devices
            await self.parts.kept.close()
            await self.services.close()
            if self.judge is not None:
                await self.judge.stop()
        finally:
            await self.engine.stop()


async def _run_all(
    workers: Sequence[Worker], feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event | None
) -> None:
    async with asyncio.TaskGroup() as waiting:
        interrupting = waiting.create_task(_abort_at(interrupt, workers)) if interrupt else None
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run(feed, deliver))
        if interrupting:  # an event that is never set would keep the outer group open
            interrupting.cancel()


async def _abort_at(interrupt: asyncio.Event, workers: Sequence[Worker]) -> None:
    await interrupt.wait()
    for worker in workers:
        worker.abort()
