"""
The core's own plugin: what turnwise itself registers, through the same door as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module, and `turnwise.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.hookspecs import hookimpl
from turnwise.observer import Observer
from turnwise.protocols import Command, Resources, Router
from turnwise.registry import NoConfig, Registry
from turnwise.routing import ROUTERS


def _rollout(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.rollout_command import RolloutCommand

    return RolloutCommand()


def _show(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.show_command import ShowCommand

    return ShowCommand()


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


def _config(_no_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.config_command import ConfigCommand

    return ConfigCommand()


def _episode_log(_config: NoConfig, _resources: Resources) -> Observer:
    from turnwise.telemetry import EpisodeLog

    return EpisodeLog()


def _bench(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.bench_command import BenchCommand

    return BenchCommand()


def _check(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.check_command import CheckCommand

    return CheckCommand()


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add the routers; `least_tokens` is the default."""
    for name, (factory, config) in ROUTERS.items():
        registry.add(name, factory, config=config)


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add the log line per episode."""
    registry.add("episode_log", _episode_log)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the commands that need no plugin."""
    registry.add("rollout", _rollout)
    registry.add("show", _show)
    registry.add("plugins", _plugins)
    registry.add("config", _config)
    registry.add("check", _check)
    registry.add("bench", _bench)
