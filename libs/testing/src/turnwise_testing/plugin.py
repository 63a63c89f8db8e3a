"""Registers the commands `check` and `new`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, hookimpl


def _check(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_testing.commands.check_command import CheckCommand

    return CheckCommand()


def _new(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_testing.scaffold.command import NewCommand

    return NewCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the commands `check` and `new`."""
    registry.add("check", _check)
    registry.add("new", _new)
