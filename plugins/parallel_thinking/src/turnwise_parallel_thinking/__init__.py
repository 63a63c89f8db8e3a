"""
Parallel thinking as in Parallel-R1 (arXiv:2509.07980): the agent `parallel_thinking`, the reward `parallel_r1` and the
command `turnwise tags`.

`model_dir` returns the folder of a tiny model that is trained to open blocks of paths.
"""

from __future__ import annotations

from pathlib import Path

from turnwise import Agent, Command, NoConfig, Registry, Resources, Reward, hookimpl
from turnwise_parallel_thinking.config import ParallelR1Config, ParallelThinkingConfig

__all__ = [
    "make_parallel_r1",
    "make_parallel_thinking",
    "make_tags",
    "model_dir",
    "register_agents",
    "register_commands",
    "register_rewards",
]


def model_dir() -> Path:
    """Return the folder of the shipped model, for `from_pretrained` and for every engine."""
    return Path(__file__).parent / "model"


def make_parallel_thinking(config: ParallelThinkingConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` if the run has no chat template, or a tag is not one token."""
    from turnwise_parallel_thinking.agent import ParallelThinking

    return ParallelThinking(config, resources)


def make_parallel_r1(config: ParallelR1Config, resources: Resources) -> Reward:
    """Build the reward, which needs no resources."""
    from turnwise_parallel_thinking.reward import ParallelR1

    return ParallelR1(config)


def make_tags(config: NoConfig, resources: Resources) -> Command:
    """Build the command, which needs neither."""
    from turnwise_parallel_thinking.tags_command import TagsCommand

    return TagsCommand(config, resources)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `parallel_thinking`."""
    registry.add("parallel_thinking", make_parallel_thinking, config=ParallelThinkingConfig)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register `parallel_r1`."""
    registry.add("parallel_r1", make_parallel_r1, config=ParallelR1Config)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `turnwise tags`."""
    registry.add("tags", make_tags)
