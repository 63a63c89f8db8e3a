"""Trains unmodified agents: serves model APIs, and records every call as token ids."""

from __future__ import annotations

from turnwise import Agent, Command, NoConfig, Registry, Resources, hookimpl
from turnwise_gateway.config import ExternalConfig


def make_external(config: ExternalConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` when the run has no chat template, or the function cannot be imported."""
    from turnwise_gateway.agents.agent import ExternalAgent

    return ExternalAgent(config, resources)


def make_gateway(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command."""
    from turnwise_gateway.commands.gateway_command import GatewayCommand

    return GatewayCommand()


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `external`."""
    registry.add("external", make_external, config=ExternalConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Register `gateway`."""
    registry.add("gateway", make_gateway)
