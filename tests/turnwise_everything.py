"""
A plugin that uses every hook once; `test_hooks.py` installs it in a separate folder.

Its parts do almost nothing, and each has an option, to show that configs reach it.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from turnwise import (
    Adapter,
    Agent,
    Capabilities,
    Chat,
    ColumnSpec,
    Command,
    Diagnostic,
    Engine,
    Episode,
    EpisodeResult,
    Finding,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GroupReward,
    Interaction,
    Message,
    Observer,
    Postprocessor,
    ReasoningParser,
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
from turnwise.protocols import GroupCall, ReplicaLoad
from turnwise.protocols.weights import Weight, WeightManifest


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
    """Base of every part: its options and resources."""

    options: Options
    resources: Resources


class SilentEngine(Part):
    """Answers with token 0."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return GenerateResult(token_ids=[0], logprobs=[0.0], finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None: ...

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {"num_running": 0}

    async def stop(self) -> None: ...


class SilentChat(Part):
    """Writes nothing."""

    stop_token_ids = (0,)

    @property
    def tokenizer(self) -> Any:
        return self

    def guard(self, content: str) -> str:
        return content

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        return ()

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> Any:
        return ()

    def text(self, token_ids: Any) -> str:
        return ""


class SilentParser(Part):
    """Finds no call."""

    def parse(self, token_ids: Any) -> tuple[str, tuple[ToolCall, ...]]:
        return "", ()


class SilentReasoning(Part):
    """Finds no reasoning."""

    def split(self, text: str) -> tuple[str, str]:
        return "", text


class SilentTool(Part):
    """Answers with nothing."""

    @property
    def schema(self) -> Mapping[str, Any]:
        return {"type": "function", "function": {"name": "silence", "description": "Say nothing."}}

    async def create(self, task: Task) -> object: ...

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text="")

    async def release(self, session: object) -> float | None: ...


class SilentUser(Part):
    """Ends every conversation."""

    async def create(self, task: Task) -> object: ...

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        return Reply(should_terminate=True)

    async def release(self, session: object) -> None: ...


class SilentAgent(Part):
    """Does nothing."""

    async def step(self, episode: Episode) -> State:
        return State.TERMINATED


class SilentReward(Part):
    """Gives nothing."""

    def score(self, episode: Episode) -> TrajectoryScore:
        return TrajectoryScore(value=0.0)


class SilentGroupReward(Part):
    """Scores every episode with 0."""

    def score_group(self, episodes: Sequence[EpisodeResult]) -> list[float]:
        return [0.0] * len(episodes)

    def unscored(self, episode: EpisodeResult) -> EpisodeResult | None:
        return episode

    @asynccontextmanager
    async def collect(self, call: GroupCall) -> AsyncIterator[Callable[[int, EpisodeResult], None]]:
        yield call.put


class SilentPostprocessor(Part):
    """Adds nothing."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        return {}


class FirstReplica(Part):
    """Chooses the first replica."""

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return 0

    def release(self, trajectory_id: str) -> None: ...


class NoTransport(Part):
    """Carries nothing."""

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        yield WeightManifest(version=version, specs=())

    async def apply(self, engine: Engine, offer: WeightManifest) -> None: ...

    async def close(self) -> None: ...


class SilentObserver(Observer):
    """Hears nothing."""

    def __init__(self, options: Options, resources: Resources) -> None:
        self.options = options


class SilentCommand(Part):
    """Prints nothing."""

    help = "say nothing"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        return 0


class SilentDiagnostic(Part):
    """Checks nothing."""

    def diagnose(self) -> Iterable[Finding]:
        return ()


class SilentAdapter(Part):
    """Knows no object."""

    def adapt(self, kind: str, value: object, options: Mapping[str, Any]) -> None:
        return None


@hookimpl
def register_adapters(registry: Registry[Adapter]) -> None:
    """Add an adapter."""
    registry.add("silent_adapter", SilentAdapter, config=Options)


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add an engine."""
    registry.add("silent_engine", SilentEngine, config=Options)


@hookimpl
def register_chats(registry: Registry[Chat]) -> None:
    """Add a chat."""
    registry.add("silent_chat", SilentChat, config=Options)


@hookimpl
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """Add a parser."""
    registry.add("silent_tool_parser", SilentParser, config=Options)


@hookimpl
def register_reasoning_parsers(registry: Registry[ReasoningParser]) -> None:
    """Add a reasoning parser."""
    registry.add("silent_reasoning_parser", SilentReasoning, config=Options)


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
def register_group_rewards(registry: Registry[GroupReward]) -> None:
    """Add a group reward."""
    registry.add("silent_group_reward", SilentGroupReward, config=Options)


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


@frozen(kw_only=True)
class SilentColumn(ColumnSpec):
    """A declaration that keeps its options."""

    options: Options


def declare_silence(options: Options, resources: Resources) -> SilentColumn:
    """Return a column whose values have the size of the options."""
    return SilentColumn(name="silent_column", dtype="int8", shape=(options.size,), fill=resources.seed, options=options)


@hookimpl
def register_columns(registry: Registry[ColumnSpec]) -> None:
    """Declare a column."""
    registry.add("silent_column", declare_silence, config=Options)


@hookimpl
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """Add a diagnostic."""
    registry.add("silent_diagnostic", SilentDiagnostic, config=Options)
