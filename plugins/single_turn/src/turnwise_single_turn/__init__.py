"""Registers the agent `single_turn`, which lets the model write one turn."""

from __future__ import annotations

from turnwise import Agent, Registry, Resources, hookimpl
from turnwise_single_turn.config import SingleTurnConfig


def make_single_turn(config: SingleTurnConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` when the run has no chat template."""
    from turnwise_single_turn.agent import SingleTurn

    return SingleTurn(config, resources.chat, resources.reasoning)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `single_turn`."""
    registry.add("single_turn", make_single_turn, config=SingleTurnConfig)
