"""
The core's own plugin: it registers the core's parts through the same hooks as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module. `turnwise.plugin.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.chat.reasoning import ThinkTags, ThinkTagsConfig
from turnwise.events.logging import EpisodeLog, RoutingLog, RoutingLogConfig
from turnwise.events.observer import Observer
from turnwise.plugin.registry import NoConfig, Registry
from turnwise.plugin.specs import hookimpl
from turnwise.protocols import Command, ReasoningParser, Resources, Reward, Router
from turnwise.routing import LeastTokensConfig, make_least_tokens


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


def _reported(_config: NoConfig, _resources: Resources) -> Reward:
    from turnwise.episode.reported_reward import ReportedReward

    return ReportedReward()


def _think_tags(config: ThinkTagsConfig, _resources: Resources) -> ReasoningParser:
    return ThinkTags(config)


@hookimpl
def register_reasoning_parsers(registry: Registry[ReasoningParser]) -> None:
    """Add the parser of reasoning between tags."""
    registry.add("think_tags", _think_tags, config=ThinkTagsConfig)


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
    """Add the logs of episodes and of routed requests."""
    registry.add("episode_log", lambda _config, _resources: EpisodeLog())
    registry.add("routing_log", lambda config, _resources: RoutingLog(config), config=RoutingLogConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the list of plugins."""
    registry.add("plugins", _plugins)
