"""A weight update of several replicas: published once, and applied by all of them at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from attrs import define, field

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols.weights import ReplicaUpdate, UpdateReport, WeightManifest, WeightSource, WeightTransport
from turnwise.runtime.remote.supervision import failure_reason
from turnwise.weights.sources import CopiedSource, Weights, source_of

UpdateReplica = Callable[[WeightManifest], Awaitable[object]]
"""Updates one replica to a published version."""


@define(eq=False)
class WeightUpdater:
    """Updates the weights of replicas through a transport, and waits at most `timeout_s` seconds for each."""

    transport: WeightTransport
    name: str
    make_source: Callable[[Weights], WeightSource] = source_of
    timeout_s: float = 600.0
    _kept: WeightManifest | WeightSource | None = field(default=None, init=False)
    _publication: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    async def update(
        self, replicas: Mapping[int, UpdateReplica], source: WeightSource, version: int, *, keep: bool = False
    ) -> UpdateReport:
        """
        Update these replicas, at least one, to a version.

        With `keep`, `repeat` can send the weights again: they stay published if the transport lasts, or are copied.

        Raises:
            EngineError: there is no replica, the weights could not be published, or every replica failed.
        """
        if not replicas:
            raise EngineError("there is no replica to update")
        started = time.perf_counter()
        # The trainer changes its weights after the update, so a copy cannot wait until a replica needs it.
        copied = CopiedSource(source) if keep and not getattr(self.transport, "lasting", False) else None
        # The weights stay published until every replica has finished: readers may still map their memory.
        async with AsyncExitStack() as publication:
            published = self.transport.publish(version, copied or source, len(replicas))
            manifest = await publication.enter_async_context(published)
            report = await self._apply(replicas, manifest, started)
            if keep:
                await self.forget()
                self._kept = manifest if copied is None else await asyncio.to_thread(copied.copy)
                self._publication = publication.pop_all() if copied is None else self._publication
        return report

    async def repeat(self, replicas: Mapping[int, UpdateReplica], version: int) -> bool:
        """Update more replicas to the kept weights, whose version this is; return False if no weights are kept."""
        if isinstance(self._kept, WeightManifest):
            await self._apply(replicas, self._kept, time.perf_counter())
        elif self._kept is not None:
            await self.update(replicas, self._kept, version)
        return self._kept is not None

    async def forget(self) -> None:
        """Free the kept weights. Idempotent."""
        self._kept = None
        await self._publication.aclose()

    async def _apply(
        self, replicas: Mapping[int, UpdateReplica], manifest: WeightManifest, started: float
    ) -> UpdateReport:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._update_one(*replica, manifest)) for replica in replicas.items()]
        updates = tuple(task.result() for task in tasks)
        # With one success the version is valid, and the caller handles the failed replicas.
        if all(update.error for update in updates):
            kind = TornWeightsError if any(update.torn for update in updates) else EngineError
            raise kind(f"no replica was updated to weight version {manifest.version}: {updates[0].error}")
        return UpdateReport(
            version=manifest.version,
            seconds=time.perf_counter() - started,
            num_tensors=len(manifest.specs),
            num_bytes=manifest.num_bytes,
            transport=self.name,
            replicas=updates,
        )

    async def _update_one(self, index: int, update_replica: UpdateReplica, manifest: WeightManifest) -> ReplicaUpdate:
        started = time.perf_counter()
        error, torn = "", False
        try:
            async with asyncio.timeout(self.timeout_s):
                await update_replica(manifest)
        except TimeoutError:
            # The replica may still be writing, so its weights are in an unknown state.
            error, torn = f"replica {index} did not finish within {self.timeout_s:g} s", True
        except Exception as raised:  # noqa: BLE001 - one replica's error goes into the report; the others are updated
            error, torn = failure_reason(raised), isinstance(getattr(raised, "cause", raised), TornWeightsError)
        return ReplicaUpdate(replica=index, seconds=time.perf_counter() - started, error=error, torn=torn)
