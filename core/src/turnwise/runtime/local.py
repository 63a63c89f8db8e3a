"""The local runtime: engine and workers in this process, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from attrs import define, field

from turnwise.episode_setup import EpisodeSpec
from turnwise.protocols import Engine
from turnwise.runtime.worker import Deliver, Worker, WorkerParts


@define(eq=False)
class LocalRuntime:
    """
    Runs episodes in this process.

    Attributes:
        engine: the only replica.
        parts: what each worker is made of.
        num_workers: how many share the episodes; results do not depend on it.
    """

    engine: Engine
    parts: WorkerParts
    num_workers: int = 1
    _workers: set[Worker] = field(factory=set, init=False)

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver) -> None:
        """Run every spec and deliver each with its place in `specs`, as they finish."""
        numbered = iter(enumerate(specs))
        workers = [Worker(self.parts) for _ in range(self.num_workers)]
        self._workers.update(workers)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(worker.run(numbered, deliver))
        finally:
            self._workers.difference_update(workers)

    async def abort(self) -> None:
        """End soon; `run` returns when every episode has been delivered."""
        for worker in tuple(self._workers):
            worker.abort()

    async def stop(self) -> None:
        """Stop the engine."""
        await self.engine.stop()
