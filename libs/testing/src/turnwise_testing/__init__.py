"""
The public test kit for plugins.

- `EngineSuite`, `ToolParserSuite`, `AgentSuite`, `RewardSuite`, `RouterSuite`, `WeightTransportSuite`, `GatewaySuite`:
  conformance suites for pytest; a plugin's file has some ten lines. Except for gateways, the same checks without pytest
  are in `turnwise_testing.engine_checks` and its neighbours, and ``turnwise check NAME`` runs them.
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
    from turnwise_testing.agent_probe import AgentProbe
    from turnwise_testing.agent_suite import AgentSuite
    from turnwise_testing.bigram import BigramEngine
    from turnwise_testing.engine_probe import EngineProbe
    from turnwise_testing.engine_suite import EngineSuite
    from turnwise_testing.gateway_suite import GatewayEndpoint, GatewaySuite
    from turnwise_testing.parser_suite import ToolParserSuite
    from turnwise_testing.reference_model import TransformersReference
    from turnwise_testing.reward_checks import RewardExample
    from turnwise_testing.reward_suite import RewardSuite
    from turnwise_testing.router_suite import RouterSuite
    from turnwise_testing.scripted import Failure, RandomPolicy, ScriptedEngine
    from turnwise_testing.strategies import scripts, trajectories
    from turnwise_testing.suite import PluginSuite
    from turnwise_testing.tokenizers import byte_tokenizer
    from turnwise_testing.transport_suite import WeightTransportSuite

__all__ = [
    "AgentProbe",
    "AgentSuite",
    "BigramEngine",
    "EngineProbe",
    "EngineSuite",
    "Failure",
    "GatewayEndpoint",
    "GatewaySuite",
    "PluginSuite",
    "RandomPolicy",
    "RewardExample",
    "RewardSuite",
    "RouterSuite",
    "ScriptedEngine",
    "ToolParserSuite",
    "TransformersReference",
    "WeightTransportSuite",
    "byte_tokenizer",
    "scripts",
    "trajectories",
]

_HOMES = {
    "AgentProbe": "agent_probe",
    "AgentSuite": "agent_suite",
    "BigramEngine": "bigram",
    "EngineProbe": "engine_probe",
    "EngineSuite": "engine_suite",
    "Failure": "scripted",
    "GatewayEndpoint": "gateway_suite",
    "GatewaySuite": "gateway_suite",
    "PluginSuite": "suite",
    "RandomPolicy": "scripted",
    "RewardExample": "reward_checks",
    "RewardSuite": "reward_suite",
    "RouterSuite": "router_suite",
    "ScriptedEngine": "scripted",
    "ToolParserSuite": "parser_suite",
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
