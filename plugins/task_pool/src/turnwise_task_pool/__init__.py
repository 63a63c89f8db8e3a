"""Outside agents lease the episodes of a run, on any number of machines, each until it has exactly one result."""

from __future__ import annotations

from turnwise import Agent, Command, NoConfig, Registry, Resources, hookimpl
from turnwise_task_pool.config import PoolConfig


def make_agent(config: PoolConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` when the run has no chat template."""
    from turnwise_task_pool.agent import PoolAgent

    return PoolAgent(config, resources)


def make_command(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command."""
    from turnwise_task_pool.command import PoolCommand

    return PoolCommand()


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `task_pool`."""
    registry.add("task_pool", make_agent, config=PoolConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Register `pool`."""
    registry.add("pool", make_command)
