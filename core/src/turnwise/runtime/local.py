"""The local runtime: engine and workers in this process, on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field

from turnwise.episode_setup import EpisodeSpec
from turnwise.loop_watch import LoopWatch
from turnwise.memory import EngineMemory
from turnwise.protocols import Engine
from turnwise.runtime.weight_updates import Prepare
from turnwise.runtime.worker import Deliver, Numbered, Worker, WorkerParts
from turnwise.weight_sources import source_of
from turnwise.weights import ReplicaUpdate, UpdateReport, Weight


@define(eq=False)
class LocalRuntime:
    """
    Runs episodes in this process.

    Attributes:
        engine: the only replica.
        parts: what each worker is made of.
        num_workers: how many share the episodes; results do not depend on it.
        judge: the engine of the model that rewards may ask, when there is one.
        prepare: makes a source of whatever weights are given.
    """

    engine: Engine
    parts: WorkerParts
    num_workers: int = 1
    judge: Engine | None = None
    prepare: Prepare = source_of
    _workers: set[Worker] = field(factory=set, init=False)
    _memory: EngineMemory = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Let nobody else put the engine to sleep."""
        self._memory = EngineMemory(self.engine)

    async def start(self) -> None:
        """Start the engine, and that of the judge."""
        await self.engine.start()
        if self.judge is not None:
            await self.judge.start()

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver, cut: asyncio.Event | None = None) -> None:
        """Run every spec and deliver each with its place in `specs`; `cut` aborts those that have not ended."""
        numbered = iter(enumerate(specs))
        workers = [Worker(self.parts, f"worker {index}") for index in range(self.num_workers)]
        self._workers.update(workers)
        try:
            with LoopWatch(self.parts.limits.loop_lag_s):
                await _run_all(workers, numbered, deliver, cut)
        finally:
            self._workers.difference_update(workers)

    async def abort(self) -> None:
        """End soon; `run` returns when every episode has been delivered."""
        for worker in tuple(self._workers):
            worker.abort()

    async def update_weights(self, weights: Iterable[Weight], version: int) -> UpdateReport:
        """Hand the weights to the engine as they are: nothing has to be carried inside one process."""
        started, source = time.perf_counter(), self.prepare(weights)
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
        """Free the engine's memory."""
        await self._memory.sleep(level)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take the memory of these tags again."""
        await self._memory.wake_up(tags)

    async def memory_bytes(self) -> int:
        """Return what the engine holds; 0 when it cannot tell."""
        return int(self.engine.stats().get("memory_bytes", 0))

    async def counts(self) -> dict[str, int]:
        """Return nothing: what dies here takes the run with it."""
        return {}

    async def stop(self) -> None:
        """Stop the engine, and that of the judge."""
        try:
            if self.judge is not None:
                await self.judge.stop()
        finally:
            await self.engine.stop()


async def _run_all(
    workers: Sequence[Worker], numbered: Iterator[Numbered], deliver: Deliver, cut: asyncio.Event | None
) -> None:
    async with asyncio.TaskGroup() as waiting:
        cutting = waiting.create_task(_abort_at(cut, workers)) if cut else None
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run(numbered, deliver))
        if cutting:
            cutting.cancel()


async def _abort_at(cut: asyncio.Event, workers: Sequence[Worker]) -> None:
    await cut.wait()
    for worker in workers:
        worker.abort()
