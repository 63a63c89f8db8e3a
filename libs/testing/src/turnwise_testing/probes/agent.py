"""
Probes of agents and rewards: tasks, a scripted model that calls tools, and the real driver around them.

The model's turns are texts chosen by a hash of the context and the request's seed, so episodes differ, and repeat. The
default turns call tools between ``<tool_call>`` tags, which `ProbeParser` reads; give others for an agent with tags of
its own. Nothing here knows pytest.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from hashlib import blake2b
from typing import Any, ClassVar

from attrs import define, evolve, field, frozen

from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EngineClient, EpisodeContext, Limits
from turnwise.plugin.host import Host, load
from turnwise.protocols import Agent, Chat, Episode, Resources, Reward, Tool
from turnwise.record.open_columns import to_plain
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.columns import build_columns
from turnwise.tools.toolbox import ToolBox
from turnwise.types import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    State,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
    ToolSchema,
)
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer

TURNS = (
    "The answer is 42.",
    'First I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "two"}}</tool_call>',
    '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": </tool_call>',
    'Wait <tool_call>{"name": "add"',
    "Grüße, 世界: no call here either.",
)
"""Texts of the scripted model: calls that are good, several, wrong, unknown, malformed and unclosed, and answers."""


@lru_cache(maxsize=1)
def probe_chat() -> ChatTemplate:
    """Return a chat template over `byte_tokenizer`; made once, because it proves itself."""
    return ChatTemplate(byte_tokenizer())


@frozen
class ProbeParser:
    """The least `ToolParser` that does: one JSON object between ``<tool_call>`` tags."""

    chat: Chat

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside the tags, and the calls."""
        text = self.chat.text(token_ids)
        calls = tuple(map(_call, re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)))
        return re.sub(r"<tool_call>.*?(?:</tool_call>|\Z)", "", text, flags=re.DOTALL), calls


def _call(raw: str) -> ToolCall:
    try:
        value = json.loads(raw)
        return ToolCall(name=value["name"], arguments=dict(value["arguments"]), raw=raw)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return ToolCall(error=f"Error: malformed call: {type(error).__name__}", raw=raw)


class AddTool:
    """The tool `add`, which adds two numbers."""

    schema: ClassVar[ToolSchema] = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "First."},
                    "b": {"type": "integer", "description": "Second."},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }

    async def create(self, task: Task) -> None: ...

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(text=str(arguments["a"] + arguments["b"]))

    async def release(self, session: object) -> None: ...


def probe_resources() -> Resources:
    """Return the resources of a typical agent: a chat template, a parser and the tool `add`."""
    tools: dict[str, Tool] = {"add": AddTool()}
    return Resources(chat=probe_chat(), parser=ProbeParser(probe_chat()), tools=tools)


def make_task(number: int = 0, **changes: Any) -> Task:
    """Return a task with its own uid and question; `changes` are further fields."""
    question = {"role": "user", "content": f"Question {number}?"}
    return evolve(Task(messages=(question,), uid=f"probe-{number}", sample_index=number), **changes)


@define(eq=False)
class RecordingEngine:
    """
    Passes on to an engine and keeps its answers by trajectory id, in order.

    Attributes:
        on_request: called with each request that the engine gets.
    """

    engine: EngineClient
    answers: dict[str, list[GenerateResult]] = field(factory=dict)
    on_request: Callable[[], object] = lambda: None

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities."""
        return self.engine.capabilities

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a context."""
        self.on_request()
        result = await self.engine.generate(request)
        self.answers.setdefault(request.trajectory_id.partition("/")[0], []).append(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request early."""
        await self.engine.abort(request_id)


@frozen
class Abort:
    """
    When an episode is told to stop.

    Attributes:
        after_s: seconds until then.
        in_turn: they begin with a request to the engine, and not with the episode.
    """

    after_s: float
    in_turn: bool = False


@frozen(kw_only=True, eq=False)
class Run:
    """
    One episode that a probe ran.

    Attributes:
        result: of the driver.
        answers: results of the engine for it, in order.
        episode: as the driver left it.
    """

    result: EpisodeResult
    answers: Sequence[GenerateResult]
    episode: LiveEpisode

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every trajectory as plain values, to be compared."""
        return [_plain(to_plain(trajectory.to_dict())) for trajectory in self.result.trajectories]


def _plain(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in saved.items()}


@frozen(kw_only=True)
class AgentProbe:
    """
    The probe of an agent.

    Attributes:
        make_agent: builds it, as the registered factory does.
        resources: of the agent; the model can call its tools.
        turns: texts of the model; see the module.
        num_tasks: how many tasks the checks run.
        response_length: a budget in which most episodes end by themselves.
        timeout_s: longest wait for one episode.
        tasks: to run; questions without answers, unless given.
    """

    make_agent: Callable[[], Agent]
    resources: Resources = field(factory=probe_resources)
    turns: tuple[str, ...] = TURNS
    num_tasks: int = 8
    response_length: int = 1024
    timeout_s: float = 600.0
    tasks: tuple[Task, ...] = field()

    @tasks.default
    def _numbered(self) -> tuple[Task, ...]:
        return tuple(map(make_task, range(self.num_tasks)))

    @cached_property
    def chat(self) -> Chat:
        """The chat template; `AssertionError` when the resources have none."""
        if self.resources.chat is None:
            raise AssertionError("the resources of an AgentProbe need a chat template")
        return self.resources.chat

    @cached_property
    def turn_ids(self) -> tuple[list[int], ...]:
        """Ids of the turns, each with its end-of-turn token."""
        return tuple([*self.chat.tokenizer.encode(turn), self.chat.stop_token_ids[0]] for turn in self.turns)

    def choose(self, request: GenerateRequest) -> list[int]:
        """Return the model's turn for a context and seed."""
        key = f"{request.sampling.seed}".encode() + request.token_ids.astype("<i4").tobytes()
        return self.turn_ids[int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % len(self.turn_ids)]

    def engine(self, **options: Any) -> ScriptedEngine:
        """Return the scripted model; `ScriptedEngine` takes the `options`."""
        return ScriptedEngine(self.choose, **options)

    def slow_engine(self, turn_s: float) -> ScriptedEngine:
        """Return the scripted model with tokens so slow that no turn takes less than `turn_s` seconds."""
        return self.engine(token_latency_s=turn_s / min(map(len, self.turn_ids)))

    def limits(self, **changes: Any) -> Limits:
        """Return generous limits with the probe's response length."""
        return evolve(Limits(prompt_length=1 << 16, response_length=self.response_length), **changes)

    async def run(
        self,
        task: Task,
        *,
        agent: Agent | None = None,
        engine: EngineClient | None = None,
        limits: Limits | None = None,
        reward: Reward | None = None,
        abort: Abort | None = None,
    ) -> Run:
        """
        Run one episode through the real driver, with invariants checked.

        Args:
            task: to run.
            agent: in place of a new one.
            engine: in place of a new one; it must have been started.
            limits: in place of the probe's.
            reward: scores the episode.
            abort: when the episode is told to stop.
        """
        client = RecordingEngine(engine or await self._started())
        recipe = EpisodeProgram(agent=agent or self.make_agent(), reward=reward, tools=ToolBox(self.resources.tools))
        sampling = SamplingParams(stop_token_ids=self.chat.stop_token_ids)
        spec = EpisodeSpec(task=task, agent_name="probe", sampling=sampling)
        try:
            async with asyncio.timeout(self.timeout_s), asyncio.TaskGroup() as group:
                services = EpisodeContext(
                    engine=client,
                    spawn=group.create_task,
                    interaction=self.resources.interaction,
                    columns={} if reward is None else build_columns(_load_plugins(), self.resources),
                )
                episode = LiveEpisode(spec=spec, limits=limits or self.limits(), context=services)
                if abort is not None:
                    stop = partial(asyncio.get_running_loop().call_later, abort.after_s, episode.abort)
                    if abort.in_turn:
                        client.on_request = stop
                    else:
                        stop()
                result = await run_episode(episode, recipe)
        except TimeoutError:
            raise AssertionError(f"the episode of task {task.uid!r} takes more than {self.timeout_s} s") from None
        return Run(result=result, answers=client.answers.get(episode.key, []), episode=episode)

    async def run_all(self, **options: Any) -> list[Run]:
        """Run every task, one after the other."""
        return [await self.run(task, **options) for task in self.tasks]

    async def _started(self) -> ScriptedEngine:
        engine = self.engine()
        await engine.start()
        return engine


@cache
def _load_plugins() -> Host:
    # A reward may fill a column that its plugin declares.
    return load()


@frozen
class ReplayAgent:
    """Runs a prompt and one turn of the model, for rewards."""

    chat: Chat

    async def step(self, episode: Episode) -> State:
        """Make one of two transitions."""
        if episode.state == State.PENDING:
            episode.begin(self.chat.prompt(episode.messages))
            return State.GENERATING
        result = await episode.generate()
        episode.messages.append({"role": "assistant", "content": self.chat.text(result.token_ids)})
        return State.TERMINATED
