"""
The contracts of the hot path: what an engine, parser, tool, agent, reward and the rest must do.

They are found once by config name and called directly; no plugin hook runs per token or per turn. A method is async
exactly when it may wait. A class fulfils a protocol by having its methods; it need not inherit from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from turnwise.engine import Engine as Engine
from turnwise.judge import Judge as Judge
from turnwise.layout import Objective
from turnwise.record import TokenRecord
from turnwise.trajectory import Trajectory
from turnwise.types import (
    GenerateRequest,
    GenerateResult,
    Message,
    SamplingParams,
    Score,
    State,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
)
from turnwise.weights import WeightTransport as WeightTransport

if TYPE_CHECKING:
    import argparse


class Tokenizer(Protocol):
    """Text to ids and back, without special treatment of either end."""

    @property
    def eos_token_id(self) -> int | None:
        """The model's end-of-turn id, if it has one."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text; special tokens spelled in it are parsed, none is added."""

    def decode(self, token_ids: Sequence[int] | TokenArray) -> str:
        """Return the text of the ids, special tokens included."""


class Chat(Protocol):
    """A chat template that only ever appends (see `turnwise.chat`)."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns its text into ids."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> TokenArray:
        """Return (P,) ids of a conversation up to where the model's turn begins."""

    def delta(self, messages: Sequence[Message], last_token_id: int) -> TokenArray:
        """
        Return (n,) ids that new messages append after a turn of the model, up to where its next turn begins.

        `last_token_id` is the record's last id: a turn that was cut before its end-of-turn token is closed first.
        """

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        """Return the text of a turn of the model, without its end-of-turn token."""


@runtime_checkable
class ToolParser(Protocol):
    """Finds tool calls in what the model sampled."""

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        """
        Return the text outside the calls, and the calls in order.

        Never raises: a malformed call is a `ToolCall` with `error` set.
        """


@runtime_checkable
class Tool(Protocol):
    """Something the model can call. One object serves many episodes at once; `session` holds what is one's own."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI function schema: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    async def create(self, task: Task) -> object:
        """Begin an episode's session, before its first call; the value comes back in the other methods."""

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Run one call; the arguments fit the schema. Calls of one session may run at the same time.

        Raises `ToolError` for what the model should read and try again, `InfrastructureError` when the call
        says nothing about the model. Any other exception is shown to the model as an error too.
        """

    async def release(self, session: object) -> float | None:
        """End the session, always, and return a reward for the whole of it or None."""


@frozen(kw_only=True)
class Reply:
    """
    What a simulated user answers.

    Attributes:
        content: the text of the user message.
        should_terminate: the conversation is over; the model does not see `content`.
        reward: what the turn earned, if the simulator gives rewards.
    """

    content: str = ""
    should_terminate: bool = False
    reward: float | None = None


@runtime_checkable
class Interaction(Protocol):
    """A user simulator: it answers a turn of the model that called no tool."""

    async def create(self, task: Task) -> object:
        """Begin a session."""

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        """Answer the conversation so far, whose last message is the model's."""

    async def release(self, session: object) -> None:
        """End the session, always."""


class Episode(Protocol):
    """
    What an agent and a reward see of an episode.

    The core implements it (`turnwise.episode`) and drives the steps, so budgets, deadlines, abort, tracing and checks
    are the same for every agent.
    """

    state: str
    """Where the agent's machine stands; the driver sets it to what `step` returned."""
    messages: list[Message]
    """The conversation as text, for rewards, simulators and people; the model is fed from `trajectory` alone."""
    memory: dict[str, Any]
    """The agent's own notes, JSON values only: with the trajectory they are all that a checkpoint needs."""

    @property
    def task(self) -> Task:
        """The row that it runs."""

    @property
    def uid(self) -> str:
        """Name of this episode: the task's `uid` and the number of the rollout."""

    @property
    def rollout_n(self) -> int:
        """Which of its group's episodes this is, from 0."""

    @property
    def global_step(self) -> int:
        """Training step that asked for it."""

    @property
    def validation(self) -> bool:
        """Whether it runs for validation, with the validation sampling parameters."""

    @property
    def trajectory(self) -> Trajectory:
        """The token record; `TrajectoryError` before `begin`."""

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling parameters for this episode."""

    @property
    def objective(self) -> Objective:
        """
        How forks are sampled and what a trainer gets of them: exact where the engine takes layouts.

        An agent may set it before the first fork. `ConfigError` for an engine that cannot, `TrajectoryError` later.
        """

    @objective.setter
    def objective(self, value: Objective) -> None: ...

    @property
    def remaining_tokens(self) -> int:
        """Response tokens that still fit, open paths counted in."""

    def begin(self, prompt_ids: TokenArray) -> None:
        """Open the record; raises or shortens by the prompt policy when it is longer than `prompt_length`."""

    async def generate(
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        drop_stops: bool = False,
    ) -> GenerateResult:
        """
        Let the model continue, and append what it sampled to the record.

        Args:
            sampling: in place of the run's own parameters.
            record: a path of an open block; the trajectory when None.
            max_tokens: upper bound for this turn; the budget bounds it in any case.
            stop_token_ids: more ids that end this turn.
            drop_stops: leave an id that ended it, and is not among `stop_token_ids`, out of the record: for an agent
                that puts a token of its own in the place of the end of the turn.

        Raises:
            BudgetExhausted: not one token fits.
            DeadlineExceeded: the turn or the episode took too long; what was sampled is kept.
        """

    def observe(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append an observation; `BudgetExhausted` when no token of the model would fit behind it."""

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append forced tokens; `BudgetExhausted` when they do not fit."""

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Run one tool call under its deadline. What goes wrong becomes a result with `error`, to be shown."""

    async def interact(self) -> Reply:
        """Ask the configured user simulator for its answer to `messages`."""

    def record_metric(self, name: str, value: float) -> None:
        """Add to a number of this episode's metrics."""


@runtime_checkable
class Agent(Protocol):
    """
    A state machine that turns a task into an episode.

    One object serves many episodes at once and keeps nothing about any: notes go to `Episode.memory`.
    """

    async def step(self, episode: Episode) -> State | str:
        """Make one transition from `episode.state` and return the next state; `State.TERMINATED` ends it."""


@runtime_checkable
class Reward(Protocol):
    """Scores a finished episode, inside the rollout; `score` may be sync or async."""

    def score(self, episode: Episode) -> Score | Any:
        """Return a `Score`, or an awaitable of one. An exception fails the episode, owned by `reward`."""


@runtime_checkable
class Postprocessor(Protocol):
    """Adds fields to a batch."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        """Return new fields for a `turnwise.batch.RolloutBatch`: name to tensor of B rows."""


@frozen(kw_only=True)
class ReplicaLoad:
    """
    What a router knows of a replica.

    Attributes:
        num_requests: requests in flight.
        num_tokens: context tokens of these.
        available: neither dead nor asleep nor draining.
    """

    num_requests: int = 0
    num_tokens: int = 0
    available: bool = True


@runtime_checkable
class Router(Protocol):
    """Chooses a replica for a trajectory."""

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index of an available replica; `EngineError` when there is none."""

    def release(self, trajectory_id: str) -> None:
        """Forget a trajectory that has ended."""


@runtime_checkable
class Command(Protocol):
    """A subcommand of `turnwise`."""

    help: str
    """One line for ``turnwise --help``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare options, with an example in the epilogue."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code: 0, 2 for bad input, 1 otherwise."""


@frozen(kw_only=True)
class ModelSpec:
    """
    Which model a run samples from.

    Attributes:
        path: directory with config, weights and tokenizer.
        trust_remote_code: run code of the model's repository; needs `revision`.
        revision: pinned commit, recorded in the run.
        chat_template: file that replaces the model's own template.
        template_options: keyword arguments for the template, such as `enable_thinking`.
    """

    path: FilePath | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    chat_template: FilePath | None = None
    template_options: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class Resources:
    """
    What a factory may use besides its own config; what a run does not have is None or empty.

    Attributes:
        model: which model.
        seed: of the run.
        chat: the chat template, when a model directory is configured.
        parser: the tool parser, when one is configured.
        tools: by the name in their schema.
        interaction: the user simulator, when one is configured.
        judge: a second model that rewards may ask, when one is configured.
    """

    model: ModelSpec = field(factory=ModelSpec)
    seed: int = 0
    chat: Chat | None = None
    parser: ToolParser | None = None
    tools: Mapping[str, Tool] = field(factory=dict)
    interaction: Interaction | None = None
    judge: Judge | None = None

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas of all tools, in configured order."""
        return tuple(tool.schema for tool in self.tools.values())
