"""
A plugin that uses every hook once: what `test_hooks.py` installs in a folder of its own.

Its parts do next to nothing, and each has an option, so that configs reach them.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from turnwise import (
    Agent,
    Capabilities,
    Command,
    Engine,
    Episode,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Interaction,
    Message,
    Observer,
    Postprocessor,
    Registry,
    Reply,
    Resources,
    Reward,
    Router,
    State,
    Task,
    Tool,
    ToolCall,
    ToolParser,
    ToolResult,
    TrajectoryScore,
    WeightTransport,
    hookimpl,
)
from turnwise.protocols import ReplicaLoad
from turnwise.weights import Offer, Weight


@frozen(kw_only=True)
class Options:
    """
    Options of every part.

    Attributes:
        size: any number.
    """

    size: int = 1


@frozen
class Part:
    """What all parts are made of."""

    options: Options
    resources: Resources


class SilentEngine(Part):
    """Answers with token 0."""

    @property
    def capabilities(self) -> Capabilities:
        """Nothing special."""
        return Capabilities()

    async def start(self) -> None:
        """Load nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer."""
        return GenerateResult(token_ids=[0], logprobs=[0.0], finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """End nothing."""

    async def sleep(self, level: int) -> None:
        """Free nothing."""

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Take nothing."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Replace nothing."""

    def stats(self) -> Mapping[str, float]:
        """Count nothing."""
        return {"num_running": 0}

    async def stop(self) -> None:
        """Free nothing."""


class SilentParser(Part):
    """Finds no call."""

    def parse(self, token_ids: Any) -> tuple[str, tuple[ToolCall, ...]]:
        """Return no text and no call."""
        return "", ()


class SilentTool(Part):
    """Answers with nothing."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """A function without parameters."""
        return {"type": "function", "function": {"name": "silence", "description": "Say nothing."}}

    async def create(self, task: Task) -> object:
        """Begin nothing."""

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer."""
        return ToolResult(text="")

    async def release(self, session: object) -> float | None:
        """End nothing."""


class SilentUser(Part):
    """Ends every conversation."""

    async def create(self, task: Task) -> object:
        """Begin nothing."""

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        """End it."""
        return Reply(should_terminate=True)

    async def release(self, session: object) -> None:
        """End nothing."""


class SilentAgent(Part):
    """Does nothing."""

    async def step(self, episode: Episode) -> State:
        """End."""
        return State.TERMINATED


class SilentReward(Part):
    """Gives nothing."""

    def score(self, episode: Episode) -> TrajectoryScore:
        """Return 0."""
        return TrajectoryScore(value=0.0)


class SilentPostprocessor(Part):
    """Adds nothing."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        """Return no field."""
        return {}


class FirstReplica(Part):
    """Chooses the first replica."""

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return 0."""
        return 0

    def release(self, trajectory_id: str) -> None:
        """Forget nothing."""


class NoTransport(Part):
    """Carries nothing."""

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Publish nothing."""
        yield Offer(version=version, specs=())

    async def apply(self, engine: Engine, offer: Offer) -> None:
        """Apply nothing."""

    async def close(self) -> None:
        """Free nothing."""


class SilentObserver(Observer):
    """Hears nothing."""

    def __init__(self, options: Options, resources: Resources) -> None:
        """Keep the options."""
        self.options = options


class SilentCommand(Part):
    """Prints nothing."""

    help = "say nothing"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare nothing."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do nothing."""
        return 0


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add an engine."""
    registry.add("silent_engine", SilentEngine, config=Options)


@hookimpl
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """Add a parser."""
    registry.add("silent_tool_parser", SilentParser, config=Options)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Add an agent."""
    registry.add("silent_agent", SilentAgent, config=Options)


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Add a tool."""
    registry.add("silent_tool", SilentTool, config=Options)


@hookimpl
def register_interactions(registry: Registry[Interaction]) -> None:
    """Add a simulated user."""
    registry.add("silent_interaction", SilentUser, config=Options)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add a reward."""
    registry.add("silent_reward", SilentReward, config=Options)


@hookimpl
def register_postprocessors(registry: Registry[Postprocessor]) -> None:
    """Add a postprocessor."""
    registry.add("silent_postprocessor", SilentPostprocessor, config=Options)


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add a router."""
    registry.add("silent_router", FirstReplica, config=Options)


@hookimpl
def register_weight_transports(registry: Registry[WeightTransport]) -> None:
    """Add a transport."""
    registry.add("silent_weight_transport", NoTransport, config=Options)


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add an observer."""
    registry.add("silent_observer", SilentObserver, config=Options)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add a command."""
    registry.add("silent_command", SilentCommand, config=Options)
