"""One update of the weights: published once, applied by every replica at the same time, and what each made of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from attrs import define

from turnwise.errors import EngineError, TornWeightsError
from turnwise.runtime.supervision import reason_of
from turnwise.weight_sources import source_of
from turnwise.weights import Offer, ReplicaUpdate, UpdateReport, WeightSource, WeightTransport

Apply = Callable[[Offer], Awaitable[Any]]
Prepare = Callable[[Any], WeightSource]


@define(eq=False)
class WeightUpdates:
    """
    Brings weights to replicas through a transport. Knows nothing of where replicas are.

    Attributes:
        transport: what carries them.
        name: of the transport, for reports.
        prepare: makes a source of whatever weights are given.
        timeout_s: longest wait for a replica.
    """

    transport: WeightTransport
    name: str
    prepare: Prepare = source_of
    timeout_s: float = 600.0

    async def update(self, replicas: Mapping[int, Apply], source: WeightSource, version: int) -> UpdateReport:
        """
        Bring a version to these replicas.

        Raises:
            EngineError: there is no replica, it could not be published, or none took it.
        """
        if not replicas:
            raise EngineError("there is no replica to bring weights to")
        started, specs = time.perf_counter(), source.specs
        async with self.transport.publish(version, source, len(replicas)) as offer, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._apply(index, apply, offer)) for index, apply in replicas.items()]
        taken = tuple(task.result() for task in tasks)
        if all(each.error for each in taken):
            kind = TornWeightsError if any(each.torn for each in taken) else EngineError
            raise kind(f"no replica took weight version {version}: {taken[0].error}")
        return UpdateReport(
            version=version,
            seconds=time.perf_counter() - started,
            num_tensors=len(specs),
            num_bytes=sum(spec.num_bytes for spec in specs),
            transport=self.name,
            replicas=taken,
        )

    async def _apply(self, index: int, apply: Apply, offer: Offer) -> ReplicaUpdate:
        started = time.perf_counter()
        error, torn = "", False
        try:
            async with asyncio.timeout(self.timeout_s):
                await apply(offer)
        except TimeoutError:
            error, torn = f"replica {index} did not take weights within {self.timeout_s:g} s", True
        except Exception as raised:  # noqa: BLE001 - what one replica raises is that replica's; it stands in the report
            error, torn = reason_of(raised), isinstance(getattr(raised, "cause", raised), TornWeightsError)
        return ReplicaUpdate(replica=index, seconds=time.perf_counter() - started, error=error, torn=torn)
