"""Registers the reward `reported`."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Reward, hookimpl
from turnwise_reported_reward.reward import ReportedReward

__all__ = ["ReportedReward"]


def make_reported(_config: NoConfig, _resources: Resources) -> Reward:
    """Return the reward."""
    return ReportedReward()


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that reads scores from outside."""
    registry.add("reported", make_reported)
