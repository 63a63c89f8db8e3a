"""
The core's own plugin: it registers the core's parts through the same hooks as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module. `turnwise.plugin.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.events.logging import EpisodeLog
from turnwise.events.observer import Observer
from turnwise.plugin.registry import NoConfig, Registry
from turnwise.plugin.specs import hookimpl
from turnwise.protocols import Command, Resources, Reward, Router
from turnwise.routing import LeastTokensConfig, make_least_tokens


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


def _reported(_config: NoConfig, _resources: Resources) -> Reward:
    from turnwise.episode.reported_reward import ReportedReward

    return ReportedReward()


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that reads scores from outside."""
    registry.add("reported", _reported)


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add the default router."""
    registry.add("least_tokens", make_least_tokens, config=LeastTokensConfig)


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add the log of episodes."""
    registry.add("episode_log", lambda _config, _resources: EpisodeLog())


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the list of plugins."""
    registry.add("plugins", _plugins)
