"""
turnwise-trl-bridge: TRL trains on what turnwise agents sampled.

`TurnwiseGRPOTrainer` is TRL's GRPOTrainer with turnwise rollouts; `rollout_worker` and `weight_transfer` are what
TRL's AsyncGRPOTrainer takes; `dataset_of` makes the data set of both. They are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from turnwise import Command, Registry, hookimpl
from turnwise_trl_bridge.command import TrlCommand

if TYPE_CHECKING:
    from turnwise_trl_bridge.grpo import TurnwiseGRPOTrainer
    from turnwise_trl_bridge.rollouts import Rollouts, dataset_of
    from turnwise_trl_bridge.tree_attention import use_sdpa_tree_attention
    from turnwise_trl_bridge.worker import EngineWeights, RolloutWorker

__all__ = [
    "EngineWeights",
    "RolloutWorker",
    "Rollouts",
    "TurnwiseGRPOTrainer",
    "dataset_of",
    "use_sdpa_tree_attention",
]

_LATER: Final = {
    "EngineWeights": "worker",
    "RolloutWorker": "worker",
    "Rollouts": "rollouts",
    "TurnwiseGRPOTrainer": "grpo",
    "dataset_of": "rollouts",
    "use_sdpa_tree_attention": "tree_attention",
}
"""Public names by the module that they are imported from on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `turnwise trl`."""
    registry.add("trl", TrlCommand)
