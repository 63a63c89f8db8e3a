"""
Registers the agent `environment`, and has the interface that environments implement.

An environment is found by its name among the entry points of the group ``turnwise.environments``, or by its place
``package.module:Name``.
"""

from __future__ import annotations

from turnwise import Agent, Registry, Resources, hookimpl
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.protocol import Action, Environment, Observation, Turn

__all__ = ["Action", "Environment", "EnvironmentConfig", "Observation", "Turn", "make_agent", "register_agents"]


def make_agent(config: EnvironmentConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` when the environment cannot be made, or the run lacks a part that it needs."""
    from turnwise_environments.agent import EnvironmentAgent

    return EnvironmentAgent(config, resources)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `environment`."""
    registry.add("environment", make_agent, config=EnvironmentConfig)
