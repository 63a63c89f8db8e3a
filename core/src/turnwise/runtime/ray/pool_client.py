"""Base classes of the actors, and of the senders of requests to replicas: workers and reward workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from attrs import frozen

from turnwise.protocols import Router
from turnwise.runtime.remote.actor_calls import OrderedActor, in_order
from turnwise.runtime.remote.channel import ChannelAddress
from turnwise.runtime.remote.replica_links import ReplicaLinks
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.types import Capabilities

P = ParamSpec("P")
A = TypeVar("A", bound="LocatedActor")


@frozen
class PoolSpec:
    """A pool of replicas, as its clients see it; `ReplicaPool` has the same attributes."""

    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0
    restart_timeout_s: float = 60.0


def keep_error(build: Callable[Concatenate[A, P], None]) -> Callable[Concatenate[A, P], None]:
    """
    Let an actor live although its constructor raises; `LocatedActor.check_built` raises the error.

    Otherwise Ray prints the traceback of the constructor, over a hundred lines, before the driver prints the reason.
    Ray also hides the class of the error then, by which the driver knows that another attempt is useless.
    """

    @wraps(build)
    def build_or_keep(self: A, /, *arguments: P.args, **options: P.kwargs) -> None:
        try:
            build(self, *arguments, **options)
        except Exception as error:  # noqa: BLE001 - raised by the first call
            self.build_error = error

    return build_or_keep


class LocatedActor(OrderedActor):
    """
    An actor that knows its place.

    Attributes:
        build_error: raised by the constructor; the actor is of no use then.
    """

    build_error: Exception | None = None

    async def check_built(self) -> None:
        """Raise the error of the constructor."""
        if self.build_error is not None:
            raise self.build_error

    async def locate(self) -> tuple[str, list[str]]:
        """Return the id of this node, and the ids of the GPUs that Ray has reserved for the actor."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class PoolClientActor(LocatedActor):
    """
    An actor with a `ReplicaPool` for each model.

    Ray can only call methods of the actor itself, so these forward the messages of the driver. All of them run on the
    actor's event loop. The messages of the replicas come through channels.
    """

    def __init__(self, name: str, make_router: Callable[[], Router], pools: Mapping[str, PoolSpec]) -> None:
        self._name = name
        self._pools = {
            pool: ReplicaPool(
                make_router(), spec.capabilities, spec.num_replicas, spec.coalesce_s, spec.restart_timeout_s
            )
            for pool, spec in pools.items()
        }
        self._links = {pool: ReplicaLinks(replicas, name) for pool, replicas in self._pools.items()}

    @in_order
    async def replicas_up(self, addresses: Mapping[int, ChannelAddress], pool: str = "policy") -> None:
        for index, address in addresses.items():
            self._links[pool].replica_up(index, address)

    @in_order
    async def replica_down(self, index: int, reason: str, pool: str = "policy", left: bool = False) -> None:
        self._links[pool].replica_down(index, reason, left=left)

    @in_order
    async def retire_replica(self, index: int, pool: str = "policy") -> None:
        await self._links[pool].retire(index)

    @in_order
    async def no_more_replicas(self, reason: str, pool: str = "policy") -> None:
        """Fail requests at once: no replica will be restarted."""
        self._pools[pool].give_up(reason)

    @in_order
    async def pardon(self, pool: str = "policy") -> None:
        """Forget the deaths of replicas: the request that caused them was found."""
        self._pools[pool].pardon()
