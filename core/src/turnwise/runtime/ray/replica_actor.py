"""The Ray actor of a replica: one engine, behind a `ReplicaServer` that does not depend on Ray."""

from __future__ import annotations

import asyncio
import os

import structlog

from turnwise.protocols import ReplicaLoad
from turnwise.protocols.weights import WeightManifest, WeightTransport
from turnwise.runtime.ray.blueprint import Blueprint
from turnwise.runtime.ray.calls import node_address
from turnwise.runtime.ray.pool_client import LocatedActor, keep_error
from turnwise.runtime.remote.actor_calls import in_order
from turnwise.runtime.remote.actor_process import prepare_process
from turnwise.runtime.remote.channel import ChannelAddress, ChannelServer, Send
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.wire import ToReplica
from turnwise.types import Capabilities
from turnwise.weights.sleep import EngineMemory


class ReplicaActor(LocatedActor):
    """
    One engine of a pool.

    It builds its engine from the blueprint. All methods but the constructor run on the actor's event loop.
    """

    @keep_error
    def __init__(self, blueprint: Blueprint, max_in_flight: int, coalesce_s: float, pool: str = "policy") -> None:
        self._engine = blueprint.make_engine() if pool == "policy" else blueprint.make_judge_engine()
        self._memory = EngineMemory(self._engine)
        self._server = ReplicaServer(self._engine, max_in_flight, coalesce_s, self._memory.state)
        # When this returns, all workers know the state: the driver may next submit an episode that depends on it.
        self._memory.announce = self._server.announce
        self._blueprint = blueprint
        self._channels = ChannelServer(self._open, self._receive, self._server.disconnect)
        self._transport: WeightTransport | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> Capabilities:
        """Start the engine and return its capabilities."""
        await self._engine.start()
        return self._engine.capabilities

    @in_order
    async def listen(self) -> ChannelAddress:
        """Accept the channels of workers; called after `watch`, which creates the task group of their requests."""
        return await self._channels.open(node_address())

    def _open(self, number: int, worker: str, send: Send) -> None:
        structlog.get_logger().debug("channel opened", worker=worker, channel=number)
        self._server.connect(number, send)

    def _receive(self, number: int, message: ToReplica) -> None:
        self._server.receive(number, message, self._group)

    @in_order
    async def pardon(self) -> None:
        """Let suspects run beside other requests."""
        self._server.pardon()

    @in_order
    async def watch(self) -> None:
        """
        Run the tasks of this actor until it stops.

        The call fails if the process dies or a task raises, and so the driver learns of either.
        """
        prepare_process()
        async with asyncio.TaskGroup() as self._group:
            await self._stopped.wait()

    async def ping(self) -> ReplicaLoad:
        """Return the load. A reply shows that the event loop is not blocked."""
        return self._server.load

    async def update_weights(self, manifest: WeightManifest) -> None:
        """Update the engine to a published version."""
        # At the first update: without updates the replica needs neither the transport nor its plugin.
        if self._transport is None:
            self._transport = self._blueprint.make_transport()
        await self._transport.apply(self._memory, manifest)

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep; workers send their requests to other replicas before it does."""
        await self._memory.sleep(level)

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """Restore memory of the engine; with all of it awake, workers send requests again."""
        await self._memory.wake_up(tags)

    async def stats(self) -> dict[str, float]:
        """Return the engine's statistics, and the bytes received and sent."""
        traffic = {name: float(getattr(self._server, name)) for name in ("bytes_in", "bytes_out", "picture_bytes_in")}
        return {**self._engine.stats(), **traffic, "pid": float(os.getpid())}

    async def stop(self) -> None:
        """Stop the engine; requests in flight end with `abort`."""
        if self._transport is not None:
            await self._transport.close()
        await self._engine.stop()
        await self._channels.close()
        self._stopped.set()
