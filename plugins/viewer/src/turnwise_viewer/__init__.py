"""Registers the command `view`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, hookimpl


def make_view(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command."""
    from turnwise_viewer.view_command import ViewCommand

    return ViewCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `view`."""
    registry.add("view", make_view)
