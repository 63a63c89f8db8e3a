"""Examples of the parts that hooks wrap: the least part of each kind, and one with every optional method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

import numpy as np
from attrs import frozen

from turnwise.plugin.wrapping import methods_of
from turnwise.protocols import (
    Agent,
    Engine,
    Episode,
    FormattedParser,
    GroupCall,
    GroupReward,
    Interaction,
    KeepingTool,
    Postprocessor,
    PromptingAgent,
    ReasoningFormat,
    Resources,
    Reward,
    ServiceAgent,
    ServiceClient,
    ServingAgent,
    Tool,
    ToolParser,
)
from turnwise.record.result import EpisodeResult
from turnwise.types import Message, Reply, Score, State, Task, TokenArray, TrajectoryScore
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AddTool, ProbeParser, probe_chat, probe_resources

_MAX_TURNS: Final = 4


@frozen
class ToolLoop:
    """Calls the tools that the model asks for, and observes their texts."""

    resources: Resources

    async def step(self, episode: Episode) -> str:
        """Begin the record, or sample a turn and make its calls."""
        chat, parser = self.resources.chat, self.resources.parser
        assert chat is not None
        assert parser is not None
        if episode.state == State.PENDING:
            episode.begin(chat.prompt(episode.messages))
            return State.GENERATING
        result = await episode.generate()
        text, calls = parser.parse(result.token_ids)
        episode.messages.append({"role": "assistant", "content": text})
        if not calls or len(episode.turn_records) == _MAX_TURNS:
            return State.TERMINATED
        for call in calls:
            answer = (await episode.call_tool(call)).text
            episode.messages.append({"role": "tool", "content": answer})
            episode.observe(np.array(chat.tokenizer.encode(answer or " "), np.int32))
        return State.GENERATING


class _ServingLoop(ToolLoop):
    """An agent with a server, a service and a prompt of the task alone, whose steps cannot be repeated."""

    resumable = False

    def first_prompt(self, task: Task) -> TokenArray:
        return probe_chat().prompt(list(task.messages))

    async def open(self) -> Mapping[str, str]:
        return {}

    async def close(self) -> None: ...

    def make_service(self) -> Any:
        return None

    def connect(self, service: ServiceClient) -> None: ...


class Length:
    """The number of response tokens."""

    def score(self, episode: Episode) -> Score:
        """Return it."""
        return TrajectoryScore(value=float(episode.trajectory.num_response_tokens))


class _Nothing:
    """Adds no fields."""

    def process(self, batch: object) -> Mapping[str, Any]:
        return {}


class _Even:
    """Scores all episodes of a task alike."""

    def score_group(self, episodes: Sequence[EpisodeResult]) -> object:
        return [0.0] * len(episodes)

    @asynccontextmanager
    async def collect(self, call: GroupCall) -> AsyncIterator[Callable[[int, EpisodeResult], None]]:
        yield call.put

    def unscored(self, episode: EpisodeResult) -> EpisodeResult | None:
        return episode


class _User:
    """A user who says nothing more."""

    async def create(self, task: Task) -> object:
        return None

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        return Reply(should_terminate=True)

    async def release(self, session: object) -> None: ...


class _Suspends:
    """The optional methods of a tool or a user."""

    async def suspend(self, session: object) -> object:
        return session

    async def restore(self, task: Task, notes: object) -> object:
        return notes


class _SuspendableTool(AddTool, _Suspends):
    session_key: ClassVar[str] = "probe"

    async def close_kept(self) -> None: ...


class _SuspendableUser(_User, _Suspends):
    pass


class _FormattedParser(ProbeParser):
    reasoning_parser = None
    tool_format = None


@frozen(kw_only=True)
class PartExample:
    """
    An example of a part.

    Attributes:
        kind: its registry.
        protocols: of the kind: the required one first, then optional ones.
        make: makes it.
        optional: methods and attributes that a part of the kind may have or lack.
    """

    kind: str
    protocols: tuple[type, ...]
    make: Callable[[], object]
    optional: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods and attributes that every part of the kind has."""
        return methods_of(self.protocols[0])


_AGENT: Final = (
    (Agent, ServingAgent, PromptingAgent, ServiceAgent),
    ("open", "close", "first_prompt", "resumable", "make_service", "connect"),
)
_SUSPENDING: Final = ("suspend", "restore")
_TOOL: Final = ((Tool, KeepingTool), (*_SUSPENDING, "session_key", "close_kept"))
_PARSER: Final = ((ToolParser, ReasoningFormat, FormattedParser), ("reasoning_parser", "tool_format"))


def _example(kind: str, make: Callable[[], object], more: tuple[tuple[type, ...], tuple[str, ...]]) -> PartExample:
    return PartExample(kind=kind, make=make, protocols=more[0], optional=more[1])


PARTS: Final[tuple[PartExample, ...]] = (
    _example("agents", lambda: ToolLoop(probe_resources()), _AGENT),
    _example("agents", lambda: _ServingLoop(probe_resources()), _AGENT),
    _example("engines", ScriptedEngine, ((Engine,), ("sleep_state",))),
    _example("group_rewards", _Even, ((GroupReward,), ())),
    _example("interactions", _User, ((Interaction,), _SUSPENDING)),
    _example("interactions", _SuspendableUser, ((Interaction,), _SUSPENDING)),
    _example("postprocessors", _Nothing, ((Postprocessor,), ())),
    _example("rewards", Length, ((Reward,), ())),
    _example("tool_parsers", lambda: ProbeParser(probe_chat()), _PARSER),
    _example("tool_parsers", lambda: _FormattedParser(probe_chat()), _PARSER),
    _example("tools", AddTool, _TOOL),
    _example("tools", _SuspendableTool, _TOOL),
)
"""Every kind of part that hooks wrap."""
