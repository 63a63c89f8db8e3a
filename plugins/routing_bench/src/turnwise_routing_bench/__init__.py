"""Registers the command `bench`, which compares routers in a simulator of replicas, and routers to compare with."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, Router, hookimpl
from turnwise_routing_bench.baseline_routers import ConsistentHash, ConsistentHashConfig, LeastRequests, RoundRobin


def make_bench(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command; the simulator is imported when the command line is parsed."""
    from turnwise_routing_bench.command import BenchCommand

    return BenchCommand()


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
def register_commands(registry: Registry[Command]) -> None:
    """Add `bench`."""
    registry.add("bench", make_bench)


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add `round_robin`, `least_requests` and `consistent_hash`."""
    registry.add("round_robin", make_round_robin)
    registry.add("least_requests", make_least_requests)
    registry.add("consistent_hash", make_consistent_hash, config=ConsistentHashConfig)
