"""
Drawn scenes with questions, a tool that crops, and a tiny vision-language model that learns to use it.

Registers the task source and the reward `drawn_scenes`, and the tool `crop`; `model_dir()` returns the model's folder.
"""

from __future__ import annotations

from pathlib import Path

from turnwise import NoConfig, Registry, Resources, Reward, Tool, hookimpl
from turnwise_task_files.task_source import TaskSource

__all__ = [
    "make_crop",
    "make_reward",
    "make_source",
    "model_dir",
    "register_rewards",
    "register_task_sources",
    "register_tools",
]


def model_dir() -> Path:
    """Return the folder of the shipped model, which `from_pretrained` and every engine load."""
    return Path(__file__).parent / "model"


def make_source(_config: NoConfig, _resources: Resources) -> TaskSource:
    """Return the task source."""
    from turnwise_drawn_scenes.source import SceneSource

    return SceneSource()


def make_crop(_config: NoConfig, _resources: Resources) -> Tool:
    """Build the tool; it uses no resources of the run."""
    from turnwise_drawn_scenes.crop import CropTool

    return CropTool()


def make_reward(_config: NoConfig, _resources: Resources) -> Reward:
    """Build the reward; it uses no resources of the run."""
    from turnwise_drawn_scenes.reward import SceneReward

    return SceneReward()


# Optional, so that a run whose config lists no plugin for task sources can use the tool.
@hookimpl(optionalhook=True)
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add the source of drawn scenes."""
    registry.add("drawn_scenes", make_source)


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Add `crop`."""
    registry.add("crop", make_crop)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add the reward that compares the answer with the pattern."""
    registry.add("drawn_scenes", make_reward)
