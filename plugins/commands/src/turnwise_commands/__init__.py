"""Registers the commands `rollout`, `show`, `plan` and `config`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Registry, Resources, hookimpl


def _rollout(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_commands.rollout_command import RolloutCommand

    return RolloutCommand()


def _show(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_commands.show_command import ShowCommand

    return ShowCommand()


def _plan(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_commands.plan_command import PlanCommand

    return PlanCommand()


def _config(_no_config: NoConfig, _resources: Resources) -> Command:
    from turnwise_commands.config_command import ConfigCommand

    return ConfigCommand()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the commands that run a config and show its results."""
    registry.add("rollout", _rollout)
    registry.add("show", _show)
    registry.add("plan", _plan)
    registry.add("config", _config)
