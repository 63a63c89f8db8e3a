"""
The public test kit for plugins.

- `EngineSuite`, `ToolParserSuite`, `ReasoningParserSuite`, `AgentSuite`, `RewardSuite`, `GroupRewardSuite`,
  `ToolSuite`, `InteractionSuite`, `PostprocessorSuite`, `RouterSuite`, `ObserverSuite`, `CommandSuite`,
  `DiagnosticSuite`, `MiddlewareSuite`, `AdapterSuite`, `WeightTransportSuite`, `EnvironmentSuite`, `GatewaySuite`,
  `LossSuite`, `AdvantageSuite`: conformance suites for pytest; a plugin's file has some ten lines. Except for the last
  three, the same checks without pytest are in `turnwise_testing.engine_checks` and its neighbours, and
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
    from turnwise_testing.adapter_checks import AdapterExample
    from turnwise_testing.adapter_suite import AdapterSuite
    from turnwise_testing.agent_probe import AgentProbe
    from turnwise_testing.agent_suite import AgentSuite
    from turnwise_testing.bigram import BigramEngine
    from turnwise_testing.command_checks import CommandExample
    from turnwise_testing.command_suite import CommandSuite
    from turnwise_testing.diagnostic_suite import DiagnosticSuite
    from turnwise_testing.engine_probe import EngineProbe
    from turnwise_testing.engine_suite import EngineSuite
    from turnwise_testing.environment_suite import EnvironmentSuite
    from turnwise_testing.gateway_suite import GatewayEndpoint, GatewaySuite
    from turnwise_testing.group_reward_checks import GroupExample
    from turnwise_testing.group_reward_suite import GroupRewardSuite
    from turnwise_testing.interaction_checks import InteractionProbe
    from turnwise_testing.interaction_suite import InteractionSuite
    from turnwise_testing.middleware_suite import MiddlewareSuite
    from turnwise_testing.objective_suites import AdvantageSuite, LossSuite
    from turnwise_testing.observer_suite import ObserverSuite
    from turnwise_testing.parser_suite import ToolParserSuite
    from turnwise_testing.postprocessor_checks import PostprocessorProbe
    from turnwise_testing.postprocessor_suite import PostprocessorSuite
    from turnwise_testing.reasoning_suite import ReasoningParserSuite
    from turnwise_testing.reference_model import TransformersReference
    from turnwise_testing.reward_checks import RewardExample
    from turnwise_testing.reward_suite import RewardSuite
    from turnwise_testing.router_suite import RouterSuite
    from turnwise_testing.scripted import Failure, RandomPolicy, ScriptedEngine
    from turnwise_testing.strategies import scripts, trajectories
    from turnwise_testing.suite import PluginSuite
    from turnwise_testing.tokenizers import byte_tokenizer
    from turnwise_testing.tool_checks import ToolExample
    from turnwise_testing.tool_suite import ToolSuite
    from turnwise_testing.transport_suite import WeightTransportSuite

__all__ = [
    "AdapterExample",
    "AdapterSuite",
    "AdvantageSuite",
    "AgentProbe",
    "AgentSuite",
    "BigramEngine",
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
    "byte_tokenizer",
    "scripts",
    "trajectories",
]

_HOMES = {
    "AdapterExample": "adapter_checks",
    "AdapterSuite": "adapter_suite",
    "AdvantageSuite": "objective_suites",
    "AgentProbe": "agent_probe",
    "AgentSuite": "agent_suite",
    "BigramEngine": "bigram",
    "CommandExample": "command_checks",
    "CommandSuite": "command_suite",
    "DiagnosticSuite": "diagnostic_suite",
    "EngineProbe": "engine_probe",
    "EngineSuite": "engine_suite",
    "EnvironmentSuite": "environment_suite",
    "Failure": "scripted",
    "GatewayEndpoint": "gateway_suite",
    "GatewaySuite": "gateway_suite",
    "GroupExample": "group_reward_checks",
    "GroupRewardSuite": "group_reward_suite",
    "InteractionProbe": "interaction_checks",
    "InteractionSuite": "interaction_suite",
    "LossSuite": "objective_suites",
    "MiddlewareSuite": "middleware_suite",
    "ObserverSuite": "observer_suite",
    "PluginSuite": "suite",
    "PostprocessorProbe": "postprocessor_checks",
    "PostprocessorSuite": "postprocessor_suite",
    "RandomPolicy": "scripted",
    "ReasoningParserSuite": "reasoning_suite",
    "RewardExample": "reward_checks",
    "RewardSuite": "reward_suite",
    "RouterSuite": "router_suite",
    "ScriptedEngine": "scripted",
    "ToolExample": "tool_checks",
    "ToolParserSuite": "parser_suite",
    "ToolSuite": "tool_suite",
    "TransformersReference": "reference_model",
    "WeightTransportSuite": "transport_suite",
    "byte_tokenizer": "tokenizers",
    "scripts": "strategies",
    "trajectories": "strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
