"""Registers the command `check`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, hookimpl


def _check(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_testing.check_command import CheckCommand

    return CheckCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the command `check`."""
    registry.add("check", _check)
