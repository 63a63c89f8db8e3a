"""
A plugin for tests of whole runs: an engine, an agent and a reward that need no model.

`turnwise_testing.whole_runs.scripted_run` installs it into a folder and writes a config that uses it.
"""

from __future__ import annotations

import os

from attrs import evolve, frozen

from turnwise import Agent, Engine, Episode, GenerateRequest, Registry, Resources, Reward, TrajectoryScore, hookimpl
from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine

_END_TOKEN_ID = 258
"""Of `turnwise_testing.inputs.tokenizers.byte_tokenizer`."""


@frozen
class EngineOptions:
    """
    Options of the engine.

    Attributes:
        seed: of the tokens.
        mean_tokens: mean length of a turn.
        token_latency_s: seconds for each token.
        num_failures: number of first requests that fail.
        breaks: every request fails.
        sampling_options: names that the engine takes in `rollout.sampling.extra`, and ignores.
        hold: path of a file; turns about questions 3 and 4 stop after two tokens until it exists. Empty for none.
    """

    seed: int = 3
    mean_tokens: int = 9
    token_latency_s: float = 0.0
    num_failures: int = 0
    breaks: bool = False
    sampling_options: tuple[str, ...] = ()
    hold: str = ""


def make_engine(options: EngineOptions, _resources: Resources) -> ScriptedEngine:
    """Return an engine whose tokens depend on seeds alone."""

    def latency(request: GenerateRequest, index: int) -> float:
        prompt = "".join(map(chr, request.token_ids[:60].tolist()))
        is_held = "Question 3" in prompt or "Question 4" in prompt
        return 1000.0 if is_held and index == 2 and not os.path.exists(options.hold) else 0.001

    engine = ScriptedEngine(
        policy=RandomPolicy(
            seed=options.seed, vocab_size=120, end_token_id=_END_TOKEN_ID, mean_tokens=options.mean_tokens
        ),
        token_latency_s=latency if options.hold else options.token_latency_s,
        failures=dict.fromkeys(range(options.num_failures), Failure.ERROR),
        record=False,
    )
    engine.capabilities = evolve(engine.capabilities, sampling_options=frozenset(options.sampling_options))
    if options.breaks:
        engine._state = "broken"  # noqa: SLF001 - the engine of this package has no other way to be broken from start
    return engine


@frozen
class AgentOptions:
    """Options of the agent: the most tokens of its turn."""

    max_tokens: int = 50


class OneTurn:
    """Samples once."""

    def __init__(self, options: AgentOptions, resources: Resources) -> None:
        self._max_tokens = options.max_tokens
        assert resources.chat is not None
        self._chat = resources.chat

    async def step(self, episode: Episode) -> str:
        if episode.state == "pending":
            episode.begin(self._chat.prompt(episode.messages))
            return "generating"
        await episode.generate(max_tokens=self._max_tokens)
        return "terminated"


class Length:
    """The number of response tokens."""

    def score(self, episode: Episode) -> TrajectoryScore:
        return TrajectoryScore(value=float(episode.trajectory.num_response_tokens))


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Register the engine `scripted`."""
    registry.add("scripted", make_engine, config=EngineOptions, reads_weights=False)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register the agent `once`."""
    registry.add("once", OneTurn, config=AgentOptions)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register the reward `length`."""
    registry.add("length", lambda _config, _resources: Length())
