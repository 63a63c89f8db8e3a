"""The plugin of the matrix of options: an engine that calls a tool and then answers, a reward and a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from turnwise import (
    Engine,
    Episode,
    GenerateRequest,
    Registry,
    Resources,
    Reward,
    Task,
    Tool,
    ToolResult,
    TrajectoryScore,
    hookimpl,
)
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
TURNS = (
    ("<tool_response>", "The result is 3. \\boxed{3}\nFinal Answer: 3"),
    ("<tools>", f"<think>I add.</think>{CALL}"),
    ("", "3"),
)
"""Answers to contexts that hold a text; the first that fits is given."""


@frozen
class EngineOptions:
    """Options of the engine: a number without effect, so that replicas may differ."""

    seed: int = 0


def make_engine(_options: EngineOptions, resources: Resources) -> ScriptedEngine:
    """Return an engine that answers in the tokens of its model."""
    found: list[Any] = []

    def answer(request: GenerateRequest) -> list[int]:
        if not found:  # a replica that gets no request needs no tokenizer
            from transformers import AutoTokenizer

            found.append(AutoTokenizer.from_pretrained(resources.model.path))
        (tokenizer,) = found
        text = tokenizer.decode(request.token_ids.tolist(), skip_special_tokens=False)
        turn = next(turn for mark, turn in TURNS if mark in text)
        return [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]

    capabilities = evolve(
        SCRIPTED_CAPABILITIES, grammars=True, sampling_options=frozenset({"min_p", "repetition_penalty"})
    )
    return ScriptedEngine(outputs=answer, record=False, capabilities=capabilities)


class Length:
    """The number of response tokens."""

    def score(self, episode: Episode) -> TrajectoryScore:
        return TrajectoryScore(value=float(episode.trajectory.num_response_tokens))


class Echo:
    """A tool that says nothing."""

    schema: ClassVar[Mapping[str, Any]] = {
        "type": "function",
        "function": {"name": "matrix_echo", "parameters": {"type": "object", "properties": {}}},
    }

    async def create(self, task: Task) -> object: ...

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text="")

    async def release(self, session: object) -> float | None: ...


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Register the engine `matrix`."""
    registry.add("matrix", make_engine, config=EngineOptions)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register the reward `matrix_length`."""
    registry.add("matrix_length", lambda _config, _resources: Length())


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Register the tool `matrix_echo`."""
    registry.add("matrix_echo", lambda _config, _resources: Echo())
