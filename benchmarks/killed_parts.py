"""
A plugin of benchmarks with kills: a scripted engine and an agent of two turns. Its tokens depend on seeds alone.

It needs neither a tokenizer nor a chat template, whose imports take most of the start of a process.
"""

from __future__ import annotations

import os

from attrs import frozen

import turnwise
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

END = 258
SCORED_FILE = "TURNWISE_BENCHMARK_SCORED"
"""Name of the environment variable that holds the path."""


@frozen
class EngineConfig:
    """Options of the engine: seconds for each token, so that a kill finds requests in flight."""

    token_latency_s: float = 0.005


class TwoTurns:
    """Samples twice, with an observation between."""

    def __init__(self, _config: object, _resources: turnwise.Resources) -> None:
        pass

    async def step(self, episode: turnwise.Episode) -> str:
        if episode.state == "pending":
            episode.begin(list(episode.messages[0]["content"].encode()))
            return "generating"
        result = await episode.generate(max_tokens=40, stop_token_ids=(END,))
        if len(episode.trajectory.turns()) == 2:
            return "terminated"
        if episode.messages[0]["content"] == "exit":
            await episode.call_tool(turnwise.ToolCall(name="leave"))
        episode.observe(result.token_ids[:3])
        return "generating"


async def leave() -> None:
    """End this process."""
    os._exit(1)


class Length:
    """The number of response tokens. Each score is noted in the file that the environment names, if it does."""

    def score(self, episode: turnwise.Episode) -> float:
        if file := os.environ.get(SCORED_FILE):
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"{episode.uid}\n")
        return float(episode.trajectory.num_response_tokens)


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry) -> None:
    """Register the scripted engine."""

    def make(config: EngineConfig, _resources: turnwise.Resources) -> ScriptedEngine:
        policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=END, mean_tokens=20)
        return ScriptedEngine(policy=policy, token_latency_s=config.token_latency_s, record=False)

    registry.add("killed_scripted", make, config=EngineConfig)


@turnwise.hookimpl
def register_agents(registry: turnwise.Registry) -> None:
    """Register the agent."""
    registry.add("killed_two_turns", TwoTurns)


@turnwise.hookimpl
def register_rewards(registry: turnwise.Registry) -> None:
    """Register the reward."""
    registry.add("killed_length", lambda _config, _resources: Length())
