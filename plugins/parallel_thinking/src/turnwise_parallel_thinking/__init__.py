"""
Parallel thinking as in Parallel-R1 (arXiv:2509.07980): the agent `parallel_thinking` and the reward `parallel_r1`.

`model_dir` returns the folder of a tiny model that is trained to open blocks of paths.
"""

from __future__ import annotations

from pathlib import Path

from turnwise import Agent, Registry, Resources, Reward, hookimpl
from turnwise_parallel_thinking.config import ParallelR1Config, ParallelThinkingConfig

__all__ = ["make_parallel_r1", "make_parallel_thinking", "model_dir", "register_agents", "register_rewards"]


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


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `parallel_thinking`."""
    registry.add("parallel_thinking", make_parallel_thinking, config=ParallelThinkingConfig)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register `parallel_r1`."""
    registry.add("parallel_r1", make_parallel_r1, config=ParallelR1Config)
