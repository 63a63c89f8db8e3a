"""
The core's own plugin: it registers the core's parts through the same hooks as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module. `turnwise.plugin.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.plugin.registry import NoConfig, Registry
from turnwise.plugin.specs import hookimpl
from turnwise.protocols import Command, Resources, Router
from turnwise.routing import LeastTokensConfig, make_least_tokens


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add the default router."""
    registry.add("least_tokens", make_least_tokens, config=LeastTokensConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the list of plugins."""
    registry.add("plugins", _plugins)
