"""The episode of a request for a replica, and the check of a router's choice."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.errors import EngineError, InfrastructureError, class_name, describe
from turnwise.protocols import ReplicaLoad, Router
from turnwise.types import GenerateRequest


def episode_of(trajectory_id: str) -> str:
    """Return the part of a trajectory id that an episode's paths and records share: all before the first slash."""
    return trajectory_id.partition("/")[0]


def checked_choice(
    router: Router, request: GenerateRequest, replicas: Sequence[ReplicaLoad], *, explain: bool
) -> tuple[int, str]:
    """Return a router's choice, and its reason if wanted; `InfrastructureError` if it cannot be used."""
    decide = getattr(router, "decide", None) if explain else None
    try:
        decision = decide(request, replicas) if decide else None
        index: int = decision.index if decision else router.choose(request, replicas)
        usable = 0 <= index < len(replicas) and replicas[index].available
    except EngineError:  # there is no replica for the request
        raise
    except Exception as error:
        raise InfrastructureError(f"router {class_name(router)}: {describe(error)}") from error
    if not usable:
        raise InfrastructureError(f"router {class_name(router)}: it chose replica {index!r}, which is not available")
    return index, str(decision.reason) if decision else ""
