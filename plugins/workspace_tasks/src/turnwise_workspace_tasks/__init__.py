"""Registers the task source `harbor`, whose tasks are folders, and the reward `workspace_tests`, which grades them."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Reward, hookimpl
from turnwise_task_files.task_source import TaskSource
from turnwise_workspace_tasks.config import RewardConfig

__all__ = ["RewardConfig", "make_harbor", "make_reward", "make_swe", "make_terminal_bench"]


def make_harbor(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the source of folders in Harbor's form."""
    from turnwise_workspace_tasks.source import FolderSource

    return FolderSource("harbor")


def make_terminal_bench(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the source of folders in Terminal-Bench's form."""
    from turnwise_workspace_tasks.source import FolderSource

    return FolderSource("terminal_bench")


def make_swe(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the source of rows in SWE-bench's form."""
    from turnwise_workspace_tasks.swe import SweSource

    return SweSource()


def make_reward(config: RewardConfig, resources: Resources) -> Reward:
    """
    Return the reward that runs a task's hidden tests in the workspace of its episode.

    Raises:
        ConfigError: the run has no tools `workspace`.
    """
    from turnwise_workspace_tasks.reward import WorkspaceTests

    return WorkspaceTests(config, resources)


# Optional, so that a run whose config lists no plugin for task sources can use the reward.
@hookimpl(optionalhook=True)
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add the sources of folders in Harbor's and in Terminal-Bench's form, and of rows in SWE-bench's."""
    registry.add("harbor", make_harbor)
    registry.add("terminal_bench", make_terminal_bench)
    registry.add("swe", make_swe)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward of hidden tests."""
    registry.add("workspace_tests", make_reward, config=RewardConfig)
