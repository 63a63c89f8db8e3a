"""
turnwise-trl-bridge: TRL trains on turnwise rollouts.

`TurnwiseGRPOTrainer` is TRL's GRPOTrainer with turnwise rollouts. `RolloutWorker` and `EngineWeights` are arguments of
TRL's AsyncGRPOTrainer. `build_dataset` builds the data set of both. Each name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from turnwise import Command, NoConfig, Registry, Resources, hookimpl

if TYPE_CHECKING:
    from turnwise_trl_bridge.grpo import TurnwiseGRPOTrainer
    from turnwise_trl_bridge.rollouts import Rollouts, build_dataset
    from turnwise_trl_bridge.tree_attention import use_sdpa_tree_attention
    from turnwise_trl_bridge.worker import EngineWeights, RolloutWorker

__all__ = [
    "EngineWeights",
    "RolloutWorker",
    "Rollouts",
    "TurnwiseGRPOTrainer",
    "build_dataset",
    "use_sdpa_tree_attention",
]

_LAZY_MODULES: Final = {
    "EngineWeights": "worker",
    "RolloutWorker": "worker",
    "Rollouts": "rollouts",
    "TurnwiseGRPOTrainer": "grpo",
    "build_dataset": "rollouts",
    "use_sdpa_tree_attention": "tree_attention",
}
"""Public names and their modules; this file imports no TRL, so that `turnwise --help` stays fast."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY_MODULES[name]}"), name)


def _trl(config: NoConfig, resources: Resources) -> Command:
    from turnwise_trl_bridge.command import TrlCommand

    return TrlCommand(config, resources)


def _sft(config: NoConfig, resources: Resources) -> Command:
    from turnwise_trl_bridge.sft_command import SftCommand

    return SftCommand(config, resources)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `turnwise trl` and `turnwise sft`."""
    registry.add("trl", _trl)
    registry.add("sft", _sft)
