"""Registers the command `bench`, which compares routers in a simulator of replicas."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, hookimpl


def make_bench(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command; the simulator is imported when the command line is parsed."""
    from turnwise_routing_bench.command import BenchCommand

    return BenchCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `bench`."""
    registry.add("bench", make_bench)
