"""Registers the agent `tool_agent`: turns with tools and a simulated user, as in verl's `ToolAgentLoop`."""

from __future__ import annotations

from turnwise import Agent, Registry, Resources, hookimpl
from turnwise_tool_agent.config import ToolAgentConfig


def make_tool_agent(config: ToolAgentConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` when the run has no chat template, or tools but no parser."""
    from turnwise_tool_agent.agent import ToolAgent

    return ToolAgent(config, resources)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `tool_agent`."""
    registry.add("tool_agent", make_tool_agent, config=ToolAgentConfig)
