"""Registers the task source and the reward `bfcl`, of the Berkeley Function Calling Leaderboard."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Reward, hookimpl
from turnwise_task_files.task_source import TaskSource

__all__ = ["make_reward", "make_source"]


def make_source(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the task source; nothing is downloaded before the first row."""
    from turnwise_bfcl.source import BfclSource

    return BfclSource()


def make_reward(_config: NoConfig, resources: Resources) -> Reward:
    """Return the reward, which needs no data besides a task."""
    from turnwise_bfcl.reward import BfclReward

    return BfclReward(resources.chat)


# Optional, so that a run whose config lists no plugin for task sources can use the reward.
@hookimpl(optionalhook=True)
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add the source of all categories."""
    registry.add("bfcl", make_source)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that compares calls with possible answers."""
    registry.add("bfcl", make_reward)
