"""Base class of the actors that send requests to replicas: workers and reward workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from turnwise.protocols import Router
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.supervision import ActorHandle
from turnwise.runtime.remote.wire import ToReplica, ToWorker
from turnwise.types import Capabilities


@frozen
class PoolSpec:
    """A pool of replicas, as its clients see it; `ReplicaPool` has the same attributes."""

    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0
    restart_timeout_s: float = 60.0


class LocatedActor:
    """An actor that knows its place."""

    async def locate(self) -> tuple[str, list[str]]:
        """Return the id of this node, and the ids of the GPUs that Ray has reserved for the actor."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class PoolClientActor(LocatedActor):
    """
    An actor with a `ReplicaPool` for each model.

    Ray can only call methods of the actor itself, so these forward the messages of the driver and the replicas. All of
    them run on the actor's event loop.
    """

    def __init__(self, name: str, make_router: Callable[[], Router], pools: Mapping[str, PoolSpec]) -> None:
        self._name = name
        self._pools = {
            pool: ReplicaPool(
                make_router(), spec.capabilities, spec.num_replicas, spec.coalesce_s, spec.restart_timeout_s
            )
            for pool, spec in pools.items()
        }

    async def replica_up(self, index: int, handle: ActorHandle, pool: str = "policy") -> None:
        receive = handle.receive.options(num_returns=0)  # once: `post` would do it for every message

        def send(message: ToReplica) -> None:
            receive.remote(self._name, message)

        self._pools[pool].replica_up(index, send)

    async def replica_down(self, index: int, reason: str, pool: str = "policy", left: bool = False) -> None:
        self._pools[pool].replica_down(index, reason, left=left)

    async def retire_replica(self, index: int, pool: str = "policy") -> None:
        await self._pools[pool].retire(index)

    async def no_more_replicas(self, reason: str, pool: str = "policy") -> None:
        """Fail requests at once: no replica will be restarted."""
        self._pools[pool].give_up(reason)

    async def pardon(self, pool: str = "policy") -> None:
        """Forget the deaths of replicas: the request that caused them was found."""
        self._pools[pool].pardon()

    async def deliver(self, index: int, message: ToWorker, pool: str = "policy") -> None:
        self._pools[pool].receive(index, message)

    async def barrier(self) -> None:
        """Return when all earlier messages of the caller have been handled: its calls are handled in order."""
