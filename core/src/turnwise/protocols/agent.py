"""The contract of agents, and the episode that they step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.layout import Objective
from turnwise.record.columns import TokenRecord
from turnwise.record.trajectory import Trajectory
from turnwise.types import GenerateResult, Message, Reply, SamplingParams, State, Task, TokenArray, ToolCall, ToolResult


class Episode(Protocol):
    """
    The view of an episode for agents and rewards.

    The core implements it (`turnwise.episode.live`) and drives the steps, so budgets, deadlines, abort, tracing and
    checks are the same for every agent.
    """

    state: str
    """State of the agent's machine; the driver sets it to the result of `step`."""
    messages: list[Message]
    """The conversation as text, for rewards, simulators and people; the model sees only `trajectory`."""
    memory: dict[str, Any]
    """The agent's notes, JSON values only; a checkpoint holds them and the trajectory."""

    @property
    def task(self) -> Task:
        """The task that it runs."""

    @property
    def uid(self) -> str:
        """Name of this episode: the task's `uid` and the number of the rollout."""

    @property
    def rollout_n(self) -> int:
        """Number of the episode within its group, from 0."""

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
        The way of sampling forks; exact where the engine accepts layouts.

        An agent may set it before the first fork. `ConfigError` for an engine that cannot, `TrajectoryError` later.
        """

    @objective.setter
    def objective(self, value: Objective) -> None: ...

    @property
    def remaining_tokens(self) -> int:
        """Response tokens that still fit; open paths count."""

    def begin(self, prompt_ids: TokenArray) -> None:
        """Start the record; the prompt policy decides when the prompt is longer than `prompt_length`."""

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
        Let the model continue, and append the sampled tokens to the record.

        Args:
            sampling: replaces the run's parameters.
            record: a path of an open block; the trajectory when None.
            max_tokens: upper bound for this turn; the budget bounds it in any case.
            stop_token_ids: more ids that end this turn.
            drop_stops: leave out of the record an id that ended the turn and is not among `stop_token_ids`, for agents
                that insert another token at the end of the turn.

        Raises:
            BudgetExhausted: not one token fits.
            DeadlineExceeded: the turn or the episode took too long; the sampled tokens are kept.
        """

    def observe(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append an observation; `BudgetExhausted` when no token of the model would fit after it."""

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append forced tokens; `BudgetExhausted` when they do not fit."""

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Run one tool call under its deadline. A failure becomes a result with `error`, for the model."""

    async def interact(self) -> Reply:
        """Ask the configured user simulator for its answer to `messages`."""

    def record_metric(self, name: str, value: float) -> None:
        """Add to a number of this episode's metrics."""


@runtime_checkable
class Agent(Protocol):
    """
    A state machine that turns a task into an episode.

    One object serves many episodes at once and keeps no state of any: notes go to `Episode.memory`.
    """

    async def step(self, episode: Episode) -> State | str:
        """Make one transition from `episode.state` and return the next state; `State.TERMINATED` ends it."""
