"""The choice of a router with its reason, which the log shows, and the key that all routers file episodes under."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from turnwise.errors import EngineError


class Reason(StrEnum):
    """The reason for a choice."""

    STICKY = "sticky"
    FIRST = "first"
    PREFIX = "prefix"
    LEFT = "left"
    OVERLOADED = "overloaded"


@frozen
class Decision:
    """
    A choice, for the logs.

    Attributes:
        index: of the chosen replica.
        reason: `sticky`: the episode's replica. `first`: the router's rule for a new episode. `prefix`: the episode is
            new, and the replica caches its group's prompt. `left`: the episode's replica is no longer available.
            `overloaded`: the episode's replica is overloaded, and this one is not.
    """

    index: int
    reason: Reason


def episode_of(trajectory_id: str) -> str:
    """Return the part of a trajectory id that an episode's paths and records share: all before the first slash."""
    return trajectory_id.partition("/")[0]


def none_available(num_replicas: int) -> EngineError:
    """Return the error of a request that no replica can take."""
    return EngineError(f"no replica is available: all {num_replicas} are dead, asleep or draining")
