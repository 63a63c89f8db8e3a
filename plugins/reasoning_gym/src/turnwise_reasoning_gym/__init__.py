"""Registers the task source and the reward `reasoning_gym`."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Reward, hookimpl
from turnwise_reasoning_gym.config import RewardConfig
from turnwise_task_files.task_source import TaskSource

__all__ = ["RewardConfig", "make_reward", "make_source"]


def make_source(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the task source."""
    from turnwise_reasoning_gym.source import ReasoningGymSource

    return ReasoningGymSource()


def make_reward(config: RewardConfig, _resources: Resources) -> Reward:
    """Return the reward; no process starts before the first answer."""
    from turnwise_reasoning_gym.reward import ReasoningGymReward

    return ReasoningGymReward(config)


# Optional, so that a run whose config lists no plugin for task sources can use the reward.
@hookimpl(optionalhook=True)
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add the source of all data sets."""
    registry.add("reasoning_gym", make_source)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that asks the data set of a task."""
    registry.add("reasoning_gym", make_reward, config=RewardConfig)
