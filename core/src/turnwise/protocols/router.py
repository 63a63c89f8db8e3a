"""The contract of routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from turnwise.types import GenerateRequest


@frozen(kw_only=True)
class ReplicaLoad:
    """
    The load of a replica, as a router sees it.

    Attributes:
        num_requests: requests in flight.
        num_tokens: context tokens of these.
        available: neither dead nor asleep nor draining.
    """

    num_requests: int = 0
    num_tokens: int = 0
    available: bool = True


@runtime_checkable
class Router(Protocol):
    """
    Chooses a replica for a trajectory.

    A router may also have `decide` with the arguments of `choose`, whose result has the `index` and a `reason`. It is
    called in place of `choose` when an observer hears the choices, such as `routing_log`.
    """

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index of an available replica; `EngineError` when there is none."""

    def release(self, trajectory_id: str) -> None:
        """Forget an ended trajectory."""
