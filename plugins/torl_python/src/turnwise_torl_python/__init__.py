"""
Reasoning with programs as in ToRL (arXiv:2503.23383): the agent `torl_python` and the reward `torl_math`.

`model_dir` returns the folder of a tiny model that is trained to write such programs.
"""

from __future__ import annotations

from pathlib import Path

from turnwise import Agent, Registry, Resources, Reward, hookimpl
from turnwise_torl_python.config import TorlMathConfig, TorlPythonConfig

__all__ = ["make_torl_math", "make_torl_python", "model_dir", "register_agents", "register_rewards"]


def model_dir() -> Path:
    """Return the folder of the shipped model, for `from_pretrained` and for every engine."""
    return Path(__file__).parent / "model"


def make_torl_python(config: TorlPythonConfig, resources: Resources) -> Agent:
    """Build the agent; `ConfigError` if the run has no chat template, or not the tool that runs code."""
    from turnwise_torl_python.agent import TorlPython

    return TorlPython(config, resources)


def make_torl_math(config: TorlMathConfig, resources: Resources) -> Reward:
    """Build the reward, which needs no resources."""
    from turnwise_torl_python.reward import TorlMath

    return TorlMath(config)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register `torl_python`."""
    registry.add("torl_python", make_torl_python, config=TorlPythonConfig)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register `torl_math`."""
    registry.add("torl_math", make_torl_math, config=TorlMathConfig)
