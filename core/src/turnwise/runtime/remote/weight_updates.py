"""A weight update of several replicas: published once, and applied by all of them at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Final, TypeVar

from attrs import define, field

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols.weights import ReplicaUpdate, UpdateReport, WeightManifest, WeightSource, WeightTransport
from turnwise.runtime.remote.supervision import failure_reason
from turnwise.weights.finishing import finish
from turnwise.weights.sources import CopiedSource, PairsSource, Weights, source_of

T = TypeVar("T")

UpdateReplica = Callable[[WeightManifest], Awaitable[object]]
"""Updates one replica to a published version."""

Kill = Callable[[int, str], None]
"""Kills a replica, for a reason; its update then ends with an error."""

_INTERRUPTED_S: Final = 10.0
"""Longest wait in seconds for the replicas after an interrupt, before they are killed."""


@define(eq=False)
class _KeptUpdate:
    """
    A past update, which replicas that start later need.

    Attributes:
        weights: published, or copied to host memory.
        names: of the weights that no later update has replaced.
    """

    version: int
    weights: WeightManifest | PairsSource
    names: set[str]
    publication: AsyncExitStack

    async def replace(self, names: Collection[str]) -> bool:
        """Forget weights that a later update has replaced; return whether any are left."""
        self.names.difference_update(names)
        if isinstance(self.weights, PairsSource):
            self.weights = PairsSource(tuple(pair for pair in self.weights.pairs if pair[0] in self.names))
        if not self.names:
            await self.publication.aclose()
        return bool(self.names)


@define(eq=False)
class WeightUpdater:
    """
    Updates the weights of replicas through a transport, and waits at most `timeout_s` seconds for each.

    An update may have some of the names, or adapters on top of earlier weights. So a replica that starts later gets the
    last value of every name, in the order of the updates.
    """

    transport: WeightTransport
    name: str
    make_source: Callable[[Weights], WeightSource] = source_of
    timeout_s: float = 600.0
    _kept: list[_KeptUpdate] = field(factory=list, init=False)
    _names: set[str] = field(factory=set, init=False)  # of all updates that a replica has applied

    async def update(
        self, replicas: Mapping[int, UpdateReplica], source: WeightSource, version: int, kill: Kill, *, keep: bool
    ) -> UpdateReport:
        """
        Update these replicas, at least one, to a version.

        With `keep`, `repeat` can send the weights again: they stay published if the transport lasts, or are copied.
        Every replica has ended its update at the end, also after an interrupt: one that is not ready in time is killed.
        So nothing reads the trainer's memory any more.

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
            report = await self._apply(replicas, manifest, started, kill)
            names = {spec.name for spec in manifest.specs}
            self._names |= names
            if keep:
                weights = manifest if copied is None else await asyncio.to_thread(copied.copy)
                self._kept = [each for each in self._kept if await each.replace(names)]
                lasting = publication.pop_all() if copied is None else AsyncExitStack()
                self._kept.append(_KeptUpdate(version, weights, names, lasting))
        return report

    async def repeat(self, replicas: Mapping[int, UpdateReplica], kill: Kill) -> bool:
        """Update more replicas to the kept weights; return False if none are kept."""
        for kept in self._kept:
            if isinstance(kept.weights, WeightManifest):
                await self._apply(replicas, kept.weights, time.perf_counter(), kill)
            else:
                await self.update(replicas, kept.weights, kept.version, kill, keep=False)
        return bool(self._kept)

    def is_complete(self, source: WeightSource) -> bool:
        """Return whether some weights replace all earlier ones, so that a new replica needs no others."""
        return self._names <= {spec.name for spec in source.specs}

    async def forget(self) -> None:
        """Free the kept weights. Idempotent."""
        for kept in self._kept:
            await kept.publication.aclose()
        self._kept.clear()

    async def _apply(
        self, replicas: Mapping[int, UpdateReplica], manifest: WeightManifest, started: float, kill: Kill
    ) -> UpdateReport:
        running: set[int] = set(replicas)
        updates = await _complete(self._update_all(replicas, manifest, running, kill), running, kill)
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

    async def _update_all(
        self, replicas: Mapping[int, UpdateReplica], manifest: WeightManifest, running: set[int], kill: Kill
    ) -> tuple[ReplicaUpdate, ...]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._update_one(*each, manifest, running, kill)) for each in replicas.items()]
        return tuple(task.result() for task in tasks)

    async def _update_one(
        self, index: int, update_replica: UpdateReplica, manifest: WeightManifest, running: set[int], kill: Kill
    ) -> ReplicaUpdate:
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        error, torn, late = "", False, f"replica {index} did not finish within {self.timeout_s:g} s"
        timer = loop.call_later(self.timeout_s, kill, index, late)
        try:
            await update_replica(manifest)
        except Exception as raised:  # noqa: BLE001 - one replica's error goes into the report; the others are updated
            error, torn = failure_reason(raised), isinstance(getattr(raised, "cause", raised), TornWeightsError)
        finally:
            running.discard(index)
            timer.cancel()
        if time.perf_counter() - started >= self.timeout_s:
            error, torn = late, True  # it was killed, and may have been writing
        return ReplicaUpdate(replica=index, seconds=time.perf_counter() - started, error=error, torn=torn)


async def _complete(work: Coroutine[object, object, T], running: Collection[int], kill: Kill) -> T:
    """
    Run some work to its end, although this task may be cancelled meanwhile: the cancellation is raised then.

    A cancelled call of an actor runs on, and would read memory that its owner changes. Replicas that are still
    `running` some time after a cancellation are killed, which ends their calls.
    """
    timers: list[asyncio.TimerHandle] = []

    def kill_later() -> None:
        if not timers:
            timers.append(asyncio.get_running_loop().call_later(_INTERRUPTED_S, _kill_all, running, kill))

    try:
        return await finish(work, on_cancel=kill_later)
    finally:
        for timer in timers:
            timer.cancel()


def _kill_all(running: Collection[int], kill: Kill) -> None:
    for index in tuple(running):
        kill(index, "its weight update was interrupted")
