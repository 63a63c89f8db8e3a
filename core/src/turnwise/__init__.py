"""
turnwise: multi-turn language-model agents for reinforcement learning.

The names here, `turnwise.types`, `turnwise.protocols` and `turnwise.errors` are what plugins use. `turnwise_testing`
is the kit that tests them.
Scripts and trainers also use the names of `_ON_DEMAND`, such as `RolloutManager` and `load_config`, which
are imported when they are asked for: a plugin that only registers something loads neither the runtime nor a tensor
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from turnwise.events.observer import Observer
from turnwise.plugin.kinds import HookSpecs, Section
from turnwise.plugin.registry import NoConfig, Registry
from turnwise.plugin.specs import hookimpl, hookspec
from turnwise.protocols import (
    Adapter,
    Agent,
    Chat,
    Command,
    Diagnostic,
    Engine,
    Episode,
    Finding,
    GroupReward,
    Interaction,
    Judge,
    ModelSpec,
    Postprocessor,
    ReasoningParser,
    Resources,
    Reward,
    Router,
    RunInfo,
    Tokenizer,
    Tool,
    ToolParser,
    WeightTransport,
    Wrapper,
)
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    PluginRecipe,
    Reply,
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
    from turnwise.batch.packed_batch import PackedBatch
    from turnwise.batch.rollout_batch import RolloutBatch
    from turnwise.config.file import load_config
    from turnwise.config.resolve import load_resolved
    from turnwise.config.run import RunConfig
    from turnwise.config.structuring import structure
    from turnwise.events.logging import configure_logging
    from turnwise.interrupts import handle_interrupts
    from turnwise.plugin.host import Host
    from turnwise.record.spec import UnfinishedEpisode
    from turnwise.runtime.launch import build_resources, check_run
    from turnwise.runtime.manager import RolloutManager
    from turnwise.runtime.placement import PoolPlacement, RunPlacement, plan_placement
    from turnwise.weights.memory import MemorySwitch

__all__ = [
    "Adapter",
    "Agent",
    "Capabilities",
    "Chat",
    "ColumnSpec",
    "Command",
    "Diagnostic",
    "Engine",
    "Episode",
    "EpisodeResult",
    "Finding",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "GroupReward",
    "HookSpecs",
    "Host",
    "Interaction",
    "Judge",
    "MemorySwitch",
    "Message",
    "ModelSpec",
    "NoConfig",
    "Observer",
    "PackedBatch",
    "PluginRecipe",
    "PoolPlacement",
    "Postprocessor",
    "ReasoningParser",
    "Registry",
    "Reply",
    "Report",
    "Resources",
    "Reward",
    "RolloutBatch",
    "RolloutManager",
    "Router",
    "RunConfig",
    "RunInfo",
    "RunPlacement",
    "SamplingParams",
    "Score",
    "Section",
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
    "UnfinishedEpisode",
    "WeightTransport",
    "Wrapper",
    "build_resources",
    "check_run",
    "configure_logging",
    "handle_interrupts",
    "hookimpl",
    "hookspec",
    "load_config",
    "load_resolved",
    "plan_placement",
    "structure",
]

_ON_DEMAND = {
    "Host": "turnwise.plugin.host",
    "MemorySwitch": "turnwise.weights.memory",
    "PackedBatch": "turnwise.batch.packed_batch",
    "PoolPlacement": "turnwise.runtime.placement",
    "RolloutBatch": "turnwise.batch.rollout_batch",
    "RolloutManager": "turnwise.runtime.manager",
    "RunConfig": "turnwise.config.run",
    "RunPlacement": "turnwise.runtime.placement",
    "UnfinishedEpisode": "turnwise.record.spec",
    "build_resources": "turnwise.runtime.launch",
    "configure_logging": "turnwise.events.logging",
    "handle_interrupts": "turnwise.interrupts",
    "check_run": "turnwise.runtime.launch",
    "load_config": "turnwise.config.file",
    "load_resolved": "turnwise.config.resolve",
    "plan_placement": "turnwise.runtime.placement",
    "structure": "turnwise.config.structuring",
}


def __getattr__(name: str) -> object:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
