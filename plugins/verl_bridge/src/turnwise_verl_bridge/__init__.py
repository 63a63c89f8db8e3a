"""
turnwise-verl-bridge: runs turnwise agents inside verl.

verl finds the agent loop `turnwise` by the entry point `verl.plugins`. `turnwise_verl_bridge.manager.TurnwiseManager`
is an `agent_loop_manager_class`. The engine `verl`, registered here, is a facade over verl's servers. The agent `verl`
runs a loop that was written for verl. The tools `verl` and the interaction `verl` are verl's own, from its YAML files.
These three need no verl around the run.
"""

from __future__ import annotations

from turnwise import Agent, Engine, Interaction, Registry, Resources, Tool, hookimpl
from turnwise_verl_bridge.config import VerlAgentConfig, VerlEngineConfig, VerlInteractionConfig, VerlToolsConfig


def make_verl(config: VerlEngineConfig, resources: Resources) -> Engine:
    """Build the facade; raise `ConfigError` outside verl, where there are no servers."""
    from turnwise_verl_bridge.engine import build_engine

    return build_engine(config, resources.model)


def make_agent(config: VerlAgentConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` where verl is not installed, or its loop is not usable."""
    from turnwise_verl_bridge.agent_loops.agent import VerlLoopAgent

    return VerlLoopAgent(config, resources)


def make_tools(config: VerlToolsConfig, _resources: Resources) -> tuple[Tool, ...]:
    """Build the tools of a file; `ConfigError` names the entry that is not usable."""
    from turnwise_verl_bridge.tools import build_tools

    return build_tools(config)


def make_interaction(config: VerlInteractionConfig, _resources: Resources) -> Interaction:
    """Build the simulated users of a file; `ConfigError` names the entry that is not usable."""
    from turnwise_verl_bridge.interactions import build_interaction

    return build_interaction(config)


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add `verl`."""
    registry.add("verl", make_verl, config=VerlEngineConfig, reads_weights=False)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Add `verl`."""
    registry.add("verl", make_agent, config=VerlAgentConfig)


@hookimpl
def register_tools(registry: Registry[Tool | tuple[Tool, ...]]) -> None:
    """Add `verl`, a set of tools."""
    registry.add("verl", make_tools, config=VerlToolsConfig)


@hookimpl
def register_interactions(registry: Registry[Interaction]) -> None:
    """Add `verl`."""
    registry.add("verl", make_interaction, config=VerlInteractionConfig)
