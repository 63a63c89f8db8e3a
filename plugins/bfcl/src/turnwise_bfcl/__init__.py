"""Registers the task source, the tools and the reward `bfcl`, of the Berkeley Function Calling Leaderboard."""

from __future__ import annotations

from turnwise import NoConfig, Registry, Resources, Reward, Tool, hookimpl
from turnwise_task_files.task_source import TaskSource

__all__ = ["make_reward", "make_source", "make_tools"]


def make_source(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the task source; nothing is downloaded before the first row."""
    from turnwise_bfcl.source import BfclSource

    return BfclSource()


def make_reward(_config: NoConfig, resources: Resources) -> Reward:
    """Return the reward, which in a run with the tools `bfcl` scores conversations, too."""
    from turnwise_bfcl.conversation_reward import ConversationReward
    from turnwise_bfcl.reward import BfclReward
    from turnwise_bfcl.tools import find_tool

    tool = find_tool(resources.tools)
    return BfclReward(resources.chat) if tool is None else ConversationReward(resources, tool)


def make_tools(_config: NoConfig, _resources: Resources) -> tuple[Tool, ...]:
    """Return the tools of the multi-turn categories; `ConfigError` when the leaderboard's wheel cannot be fetched."""
    from turnwise_bfcl.tools import build_tools

    return build_tools()


# Optional, so that a run whose config lists no plugin for task sources can use the reward.
@hookimpl(optionalhook=True)
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add the source of all categories."""
    registry.add("bfcl", make_source)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that compares calls with possible answers."""
    registry.add("bfcl", make_reward)


@hookimpl
def register_tools(registry: Registry[Tool | tuple[Tool, ...]]) -> None:
    """Add the functions of the simulated programs."""
    registry.add("bfcl", make_tools)
