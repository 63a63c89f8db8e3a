"""
turnwise: multi-turn language-model agents for reinforcement learning.

The names here, `turnwise.types`, `turnwise.protocols`, `turnwise.errors` and `turnwise.testing` are what plugins use.
Scripts and trainers also use `manager_of`, `RolloutManager`, `RolloutBatch`, `load_config` and `load_tasks`, which are
imported when they are asked for: a plugin that only registers something loads neither the runtime nor a tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from turnwise.hookspecs import hookimpl
from turnwise.observer import Observer
from turnwise.protocols import (
    Agent,
    Chat,
    Command,
    Engine,
    Episode,
    Interaction,
    ModelSpec,
    Postprocessor,
    Reply,
    Resources,
    Reward,
    Router,
    Tokenizer,
    Tool,
    ToolParser,
    WeightTransport,
)
from turnwise.registry import NoConfig, Registry
from turnwise.result import EpisodeResult
from turnwise.trajectory import Trajectory
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    PluginRecipe,
    SamplingParams,
    Score,
    State,
    Status,
    Task,
    TokenScore,
    ToolCall,
    ToolResult,
    TrajectoryScore,
    TurnScore,
)

if TYPE_CHECKING:
    from turnwise.batch import RolloutBatch
    from turnwise.config_file import load_config
    from turnwise.dataset import load_tasks
    from turnwise.runtime.assembly import manager_of
    from turnwise.runtime.manager import RolloutManager

__all__ = [
    "Agent",
    "Capabilities",
    "Chat",
    "Command",
    "Engine",
    "Episode",
    "EpisodeResult",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "Interaction",
    "Message",
    "ModelSpec",
    "NoConfig",
    "Observer",
    "PluginRecipe",
    "Postprocessor",
    "Registry",
    "Reply",
    "Resources",
    "Reward",
    "RolloutBatch",
    "RolloutManager",
    "Router",
    "SamplingParams",
    "Score",
    "State",
    "Status",
    "Task",
    "TokenScore",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolParser",
    "ToolResult",
    "Trajectory",
    "TrajectoryScore",
    "TurnScore",
    "WeightTransport",
    "hookimpl",
    "load_config",
    "load_tasks",
    "manager_of",
]

_ON_DEMAND = {
    "RolloutBatch": "turnwise.batch",
    "RolloutManager": "turnwise.runtime.manager",
    "load_config": "turnwise.config_file",
    "load_tasks": "turnwise.dataset",
    "manager_of": "turnwise.runtime.assembly",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
