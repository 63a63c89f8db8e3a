"""
turnwise: multi-turn language-model agents for reinforcement learning.

The names here, `turnwise.types`, `turnwise.protocols`, `turnwise.errors` and `turnwise.testing` are what plugins use.
"""

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
]
