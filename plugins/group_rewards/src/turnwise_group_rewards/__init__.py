"""Registers the group reward `relative_length`."""

from __future__ import annotations

from turnwise import GroupReward, Registry, Resources, hookimpl
from turnwise_group_rewards.config import RelativeLengthConfig


def make_relative_length(config: RelativeLengthConfig, resources: Resources) -> GroupReward:
    """Build the reward for short answers."""
    from turnwise_group_rewards.relative_length import RelativeLength

    return RelativeLength(config, resources)


@hookimpl
def register_group_rewards(registry: Registry[GroupReward]) -> None:
    """Register `relative_length`."""
    registry.add("relative_length", make_relative_length, config=RelativeLengthConfig)
