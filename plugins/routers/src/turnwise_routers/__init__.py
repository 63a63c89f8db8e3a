"""Registers the default router `least_tokens`, and routers with the simple rules of other systems."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Router, hookimpl
from turnwise_routers.baseline_routers import ConsistentHash, ConsistentHashConfig, LeastRequests, RoundRobin
from turnwise_routers.least_tokens import LeastTokens, LeastTokensConfig

__all__ = [
    "ConsistentHash",
    "ConsistentHashConfig",
    "LeastRequests",
    "LeastTokens",
    "LeastTokensConfig",
    "RoundRobin",
    "register_routers",
]


def make_least_tokens(config: LeastTokensConfig, _resources: Resources) -> Router:
    """Return the router."""
    return LeastTokens(config)


def make_round_robin(_config: NoConfig, _resources: Resources) -> Router:
    """Return the router."""
    return RoundRobin()


def make_least_requests(_config: NoConfig, _resources: Resources) -> Router:
    """Return the router."""
    return LeastRequests()


def make_consistent_hash(config: ConsistentHashConfig, _resources: Resources) -> Router:
    """Return the router."""
    return ConsistentHash(config)


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add `least_tokens`, `round_robin`, `least_requests` and `consistent_hash`."""
    registry.add("least_tokens", make_least_tokens, config=LeastTokensConfig)
    registry.add("round_robin", make_round_robin)
    registry.add("least_requests", make_least_requests)
    registry.add("consistent_hash", make_consistent_hash, config=ConsistentHashConfig)
