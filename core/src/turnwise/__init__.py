"""
turnwise: multi-turn language-model agents for reinforcement learning.

The names here, `turnwise.types`, `turnwise.protocols`, `turnwise.errors` and `turnwise.testing` are what plugins use.
Scripts and trainers also use the names of `_ON_DEMAND`, such as `manager_of`, `RolloutManager` and `load_config`, which
are imported when they are asked for: a plugin that only registers something loads neither the runtime nor a tensor
library.
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
    Judge,
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
    from turnwise.cli.resolved_config import load_resolved
    from turnwise.config_file import load_config
    from turnwise.config_structure import structure
    from turnwise.dataset import load_tasks
    from turnwise.episode_spec import UnfinishedEpisode
    from turnwise.memory import MemorySwitch
    from turnwise.runtime.assembly import manager_of, tasks_of
    from turnwise.runtime.manager import RolloutManager
    from turnwise.runtime.placement import placement_of
    from turnwise.storage import TrajectoryWriter, read_results
    from turnwise.telemetry import configure_logging
    from turnwise.unfinished_file import load_unfinished, save_unfinished

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
    "Judge",
    "MemorySwitch",
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
    "TrajectoryWriter",
    "TurnScore",
    "UnfinishedEpisode",
    "WeightTransport",
    "configure_logging",
    "hookimpl",
    "load_config",
    "load_resolved",
    "load_tasks",
    "load_unfinished",
    "manager_of",
    "placement_of",
    "read_results",
    "save_unfinished",
    "structure",
    "tasks_of",
]

_ON_DEMAND = {
    "MemorySwitch": "turnwise.memory",
    "RolloutBatch": "turnwise.batch",
    "RolloutManager": "turnwise.runtime.manager",
    "TrajectoryWriter": "turnwise.storage",
    "UnfinishedEpisode": "turnwise.episode_spec",
    "configure_logging": "turnwise.telemetry",
    "load_config": "turnwise.config_file",
    "load_resolved": "turnwise.cli.resolved_config",
    "load_tasks": "turnwise.dataset",
    "load_unfinished": "turnwise.unfinished_file",
    "manager_of": "turnwise.runtime.assembly",
    "placement_of": "turnwise.runtime.placement",
    "read_results": "turnwise.storage",
    "save_unfinished": "turnwise.unfinished_file",
    "structure": "turnwise.config_structure",
    "tasks_of": "turnwise.runtime.assembly",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
