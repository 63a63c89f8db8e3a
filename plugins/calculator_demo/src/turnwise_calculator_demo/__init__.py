"""
A tiny language model with tasks, a tool and a reward: turnwise runs end to end without a download.

Registers the tool `calculator` and the reward `exact_match`; `model_dir()` returns the model's folder.
"""

from __future__ import annotations

from pathlib import Path

from turnwise import Registry, Resources, Reward, Tool, hookimpl
from turnwise_calculator_demo.config import CalculatorConfig

__all__ = ["make_calculator", "make_exact_match", "model_dir", "register_rewards", "register_tools"]


def model_dir() -> Path:
    """Return the folder of the shipped model, which `from_pretrained` and every engine load."""
    return Path(__file__).parent / "model"


def make_calculator(config: CalculatorConfig, resources: Resources) -> Tool:
    """Build the tool; it uses no resources of the run."""
    from turnwise_calculator_demo.plugin import CalculatorTool

    return CalculatorTool(config)


def make_exact_match(config: object, resources: Resources) -> Reward:
    """Build the reward; it uses no resources of the run."""
    from turnwise_calculator_demo.plugin import ExactMatch

    return ExactMatch()


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Add `calculator`."""
    registry.add("calculator", make_calculator, config=CalculatorConfig)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add `exact_match`."""
    registry.add("exact_match", make_exact_match)
