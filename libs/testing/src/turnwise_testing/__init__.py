"""
The public test kit for plugins.

- `EngineSuite`, `ChatSuite`, `ToolParserSuite`, `ReasoningParserSuite`, `AgentSuite`, `RewardSuite`,
  `GroupRewardSuite`, `ToolSuite`, `InteractionSuite`, `PostprocessorSuite`, `RouterSuite`, `ObserverSuite`,
  `CommandSuite`, `DiagnosticSuite`, `WrapperSuite`, `MiddlewareSuite`, `AdapterSuite`, `WeightTransportSuite`,
  `EnvironmentSuite`, `GatewaySuite`, `LossSuite`, `AdvantageSuite`: conformance suites for pytest; a plugin's file has
  some ten lines. Except for the last three, the same checks without pytest are in `turnwise_testing.checks`, and
  ``turnwise check NAME`` runs them.
- `ScriptedEngine`, `RandomPolicy`, `Failure`: a fake engine with given outputs, latencies and failures.
- `BigramEngine`: a fake engine with weights that can be updated, dropped and compared with.
- `trajectories`, `scripts`: hypothesis strategies for token records.
- `byte_tokenizer`: a real tokenizer with no download.

Names are imported when they are asked for, so that a fake engine needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise_testing.checks.adapter import AdapterExample
    from turnwise_testing.checks.command import CommandExample
    from turnwise_testing.checks.group_reward import GroupExample
    from turnwise_testing.checks.interaction import InteractionProbe
    from turnwise_testing.checks.postprocessor import PostprocessorProbe
    from turnwise_testing.checks.reward import RewardExample
    from turnwise_testing.checks.tool import ToolExample
    from turnwise_testing.engines.bigram import BigramEngine
    from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine
    from turnwise_testing.inputs.strategies import scripts, trajectories
    from turnwise_testing.inputs.tokenizers import byte_tokenizer
    from turnwise_testing.probes.agent import AgentProbe
    from turnwise_testing.probes.engine import EngineProbe
    from turnwise_testing.references.reference_model import TransformersReference
    from turnwise_testing.suites.adapter import AdapterSuite
    from turnwise_testing.suites.agent import AgentSuite
    from turnwise_testing.suites.chat import ChatSuite
    from turnwise_testing.suites.command import CommandSuite
    from turnwise_testing.suites.diagnostic import DiagnosticSuite
    from turnwise_testing.suites.engine import EngineSuite
    from turnwise_testing.suites.environment import EnvironmentSuite
    from turnwise_testing.suites.gateway import GatewayEndpoint, GatewaySuite
    from turnwise_testing.suites.group_reward import GroupRewardSuite
    from turnwise_testing.suites.interaction import InteractionSuite
    from turnwise_testing.suites.objective import AdvantageSuite, LossSuite
    from turnwise_testing.suites.observer import ObserverSuite
    from turnwise_testing.suites.parser import ToolParserSuite
    from turnwise_testing.suites.plugin import PluginSuite
    from turnwise_testing.suites.postprocessor import PostprocessorSuite
    from turnwise_testing.suites.reasoning import ReasoningParserSuite
    from turnwise_testing.suites.reward import RewardSuite
    from turnwise_testing.suites.router import RouterSuite
    from turnwise_testing.suites.tool import ToolSuite
    from turnwise_testing.suites.transport import WeightTransportSuite
    from turnwise_testing.suites.wrapper import MiddlewareSuite, WrapperSuite

__all__ = [
    "AdapterExample",
    "AdapterSuite",
    "AdvantageSuite",
    "AgentProbe",
    "AgentSuite",
    "BigramEngine",
    "ChatSuite",
    "CommandExample",
    "CommandSuite",
    "DiagnosticSuite",
    "EngineProbe",
    "EngineSuite",
    "EnvironmentSuite",
    "Failure",
    "GatewayEndpoint",
    "GatewaySuite",
    "GroupExample",
    "GroupRewardSuite",
    "InteractionProbe",
    "InteractionSuite",
    "LossSuite",
    "MiddlewareSuite",
    "ObserverSuite",
    "PluginSuite",
    "PostprocessorProbe",
    "PostprocessorSuite",
    "RandomPolicy",
    "ReasoningParserSuite",
    "RewardExample",
    "RewardSuite",
    "RouterSuite",
    "ScriptedEngine",
    "ToolExample",
    "ToolParserSuite",
    "ToolSuite",
    "TransformersReference",
    "WeightTransportSuite",
    "WrapperSuite",
    "byte_tokenizer",
    "scripts",
    "trajectories",
]

_HOMES = {
    "AdapterExample": "checks.adapter",
    "AdapterSuite": "suites.adapter",
    "AdvantageSuite": "suites.objective",
    "AgentProbe": "probes.agent",
    "AgentSuite": "suites.agent",
    "BigramEngine": "engines.bigram",
    "ChatSuite": "suites.chat",
    "CommandExample": "checks.command",
    "CommandSuite": "suites.command",
    "DiagnosticSuite": "suites.diagnostic",
    "EngineProbe": "probes.engine",
    "EngineSuite": "suites.engine",
    "EnvironmentSuite": "suites.environment",
    "Failure": "engines.scripted",
    "GatewayEndpoint": "suites.gateway",
    "GatewaySuite": "suites.gateway",
    "GroupExample": "checks.group_reward",
    "GroupRewardSuite": "suites.group_reward",
    "InteractionProbe": "checks.interaction",
    "InteractionSuite": "suites.interaction",
    "LossSuite": "suites.objective",
    "MiddlewareSuite": "suites.wrapper",
    "ObserverSuite": "suites.observer",
    "PluginSuite": "suites.plugin",
    "PostprocessorProbe": "checks.postprocessor",
    "PostprocessorSuite": "suites.postprocessor",
    "RandomPolicy": "engines.scripted",
    "ReasoningParserSuite": "suites.reasoning",
    "RewardExample": "checks.reward",
    "RewardSuite": "suites.reward",
    "RouterSuite": "suites.router",
    "ScriptedEngine": "engines.scripted",
    "ToolExample": "checks.tool",
    "ToolParserSuite": "suites.parser",
    "ToolSuite": "suites.tool",
    "TransformersReference": "references.reference_model",
    "WeightTransportSuite": "suites.transport",
    "WrapperSuite": "suites.wrapper",
    "byte_tokenizer": "inputs.tokenizers",
    "scripts": "inputs.strategies",
    "trajectories": "inputs.strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
