"""A weight update of several replicas: published once, and applied by all of them at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from attrs import define

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols.weights import ReplicaUpdate, UpdateReport, WeightManifest, WeightSource, WeightTransport
from turnwise.runtime.remote.supervision import failure_reason
from turnwise.weights.sources import Weights, source_of

UpdateReplica = Callable[[WeightManifest], Awaitable[object]]
"""Updates one replica to a published version."""

MakeSource = Callable[[Weights], WeightSource]
"""Returns a source of anything that `RolloutManager.update_weights` accepts."""


@define(eq=False)
class WeightUpdater:
    """
    Updates the weights of replicas through a transport.

    Attributes:
        transport: carries the weights.
        name: of the transport, for reports.
        make_source: converts the weights that a trainer passes.
        timeout_s: longest wait in seconds for one replica.
    """

    transport: WeightTransport
    name: str
    make_source: MakeSource = source_of
    timeout_s: float = 600.0

    async def update(self, replicas: Mapping[int, UpdateReplica], source: WeightSource, version: int) -> UpdateReport:
        """
        Update these replicas to a version.

        Raises:
            EngineError: there is no replica, the weights could not be published, or every replica failed.
        """
        if not replicas:
            raise EngineError("there is no replica to update")
        started, specs = time.perf_counter(), source.specs
        # The weights stay published until every replica has finished: readers may still map their memory.
        async with self.transport.publish(version, source, len(replicas)) as manifest, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._update_one(*replica, manifest)) for replica in replicas.items()]
        updates = tuple(task.result() for task in tasks)
        # With one success the version is valid, and the caller handles the failed replicas.
        if all(update.error for update in updates):
            kind = TornWeightsError if any(update.torn for update in updates) else EngineError
            raise kind(f"no replica was updated to weight version {version}: {updates[0].error}")
        return UpdateReport(
            version=version,
            seconds=time.perf_counter() - started,
            num_tensors=len(specs),
            num_bytes=sum(spec.num_bytes for spec in specs),
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
