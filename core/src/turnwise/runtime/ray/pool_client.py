"""What actors that use replicas have in common: a pool of links per model, and the messages that keep it up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from turnwise.protocols import Router
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.wire import ToReplica, ToWorker
from turnwise.types import Capabilities


@frozen
class Peer:
    """
    The replicas of a model, as those who use them must know them.

    Attributes:
        capabilities: of the replicas, which are all alike.
        num_replicas: how many there are.
        coalesce_s: shortest time between two messages to one of them.
    """

    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0


class PoolClientActor:
    """Base of the actors that use replicas; all methods run on the actor's event loop."""

    def __init__(self, name: str, make_router: Callable[[], Router], peers: Mapping[str, Peer]) -> None:
        self._name = name
        self._pools = {
            pool: ReplicaPool(make_router(), peer.capabilities, peer.num_replicas, peer.coalesce_s)
            for pool, peer in peers.items()
        }

    async def replica_up(self, index: int, handle: Any, pool: str = "policy") -> None:
        """Use a replica, new or restarted."""
        receive = handle.receive.options(num_returns=0)

        def send(message: ToReplica) -> None:
            receive.remote(self._name, message)

        self._pools[pool].replica_up(index, send)

    async def replica_down(self, index: int, reason: str, pool: str = "policy") -> None:
        """Stop using a replica."""
        self._pools[pool].replica_down(index, reason)

    async def no_more_replicas(self, reason: str, pool: str = "policy") -> None:
        """Wait for no replica any more: none will be restarted."""
        self._pools[pool].give_up(reason)

    async def deliver(self, index: int, message: ToWorker, pool: str = "policy") -> None:
        """Take a replica's message."""
        self._pools[pool].receive(index, message)

    async def hear(self) -> None:
        """Return once what the caller sent before this has been taken: its messages stay in order."""
