"""
The core's own plugin: it registers the core's parts through the same hooks as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module. `turnwise.plugin.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.plugin.registry import NoConfig, Registry
from turnwise.plugin.specs import hookimpl
from turnwise.protocols import Command, Resources


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the list of plugins."""
    registry.add("plugins", _plugins)
