"""The contract of agents, and the episode that they step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.layout import Objective
from turnwise.record.columns import TokenRecord
from turnwise.record.lineage import RecordLineage
from turnwise.record.outside_call import OutsideCall
from turnwise.record.trajectory import Mark, Trajectory
from turnwise.report import Report
from turnwise.types import (
    Capabilities,
    GenerateResult,
    MediaTokens,
    Message,
    Reply,
    SamplingParams,
    State,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
)


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
        """The record that was opened last; `TrajectoryError` before `begin`."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """All records, in the order in which they were opened."""

    @property
    def turn_records(self) -> Sequence[int]:
        """The number of the record of each turn with tokens, from 0, in the order in which the turns were appended."""

    @property
    def lineage(self) -> Sequence[RecordLineage]:
        """The lineage of each record; empty when none was described or branched."""

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling parameters for this episode."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine."""

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
        """`remaining` of the last record."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that a record can have, prompt and response together."""

    @property
    def max_pictures(self) -> int:
        """Most pictures that a record can have."""

    def remaining(self, record: TokenRecord) -> int:
        """Return the response tokens that still fit in a record; open paths count."""

    def begin(self, prompt_ids: TokenArray | MediaTokens, *, seed_name: str = "") -> Trajectory:
        """
        Open a record and return it; earlier ones stay open.

        Args:
            prompt_ids: (P,) ids, perhaps with pictures; the prompt policy decides when they are more than
                `prompt_length`.
            seed_name: replaces the number of the record in the seeds of its turns, so that the results of
                conversations do not depend on the order in which they start. Named records do not count in the
                numbers of the others.

        Raises:
            BudgetExhausted: the episode has `max_records` records.
        """

    def branch(self, record: Trajectory, mark: Mark, *, seed_name: str = "") -> Trajectory:
        """
        Open a record that is a copy of another one up to a mark, and return it.

        Its sampled tokens up to there are `Origin.REPLAYED`: attention sees them and the loss does not, because the
        other record trains them.

        Args:
            record: of this episode; it stays as it is.
            mark: result of `record.mark()`, with no block open.
            seed_name: as in `begin`.

        Raises:
            BudgetExhausted: the episode has `max_records` records.
            TrajectoryError: the mark does not fit the record.
        """

    def close_record(self, record: Trajectory) -> None:
        """Refuse further tokens of a record; the end of the episode closes all."""

    def describe_record(
        self,
        record: Trajectory,
        *,
        kind: str = "main",
        label: str = "",
        parent: Trajectory | None = None,
        trained: bool = True,
    ) -> None:
        """
        Set the lineage of a record, which the result of the episode holds.

        Args:
            record: of this episode.
            kind: its role, such as `main` or `subagent`.
            label: free text for people.
            parent: the record that it serves; `branch` sets it for a branch.
            trained: whether batches have rows of it.
        """

    async def generate(
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        drop_stops: bool = False,
        grammar: str | None = None,
    ) -> GenerateResult:
        """
        Let the model continue a record, and append the sampled tokens to it.

        Records are continued at the same time if the agent asks for it, each of them by one request at a time.

        Args:
            sampling: replaces the run's parameters.
            record: an open record or a path of an open block; the last record when None.
            max_tokens: upper bound for this turn; the budget bounds it in any case.
            stop_token_ids: more ids that end this turn.
            drop_stops: leave out of the record an id that ended the turn and is not among `stop_token_ids`, for agents
                that insert another token at the end of the turn.
            grammar: of the turn, see `Grammar`; its tokens are `Origin.CONSTRAINED`, which the loss does not see.

        Raises:
            BudgetExhausted: not one token fits.
            DeadlineExceeded: the turn or the episode took too long; the sampled tokens are kept.
            TrajectoryError: a request for this record is in flight.
            ConfigError: the engine does not support grammars.
        """

    async def sample(  # noqa: PLR0913 - keywords, each with a default
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], object] | None = None,
        on_cut: Callable[[GenerateResult], object] | None = None,
        grammar: str | None = None,
    ) -> GenerateResult:
        """
        Let the model continue a record as `generate` does, and append nothing.

        The agent hands the result to `append` in the same step, or drops it. After a dropped sample the record can be
        sampled again, with another seed. Cancelling the call aborts the request and leaves no trace.

        Args:
            sampling: as in `generate`.
            record: as in `generate`.
            max_tokens: as in `generate`.
            stop_token_ids: as in `generate`.
            stop: more strings that end this turn; they need an engine with the capability `stop_strings`.
            on_tokens: as in `GenerateRequest`.
            on_cut: called with what the engine has sampled when this call is cancelled. The cancellation waits for it,
                at most two `abort_grace_s`. Not called at the end of the episode, if the engine fails or does not
                return in time, or without its capability `abort`.
            grammar: as in `generate`.

        Raises:
            BudgetExhausted, DeadlineExceeded, TrajectoryError: as in `generate`; no sampled token is kept.
            ConfigError: the engine does not support stop strings, or grammars.
        """

    def append(self, result: GenerateResult, *, record: TokenRecord | None = None) -> None:
        """Append a result of `sample`; `TrajectoryError` for another record, or one that has changed since."""

    def observe(self, token_ids: TokenArray | MediaTokens, *, record: TokenRecord | None = None) -> None:
        """
        Append an observation, perhaps with pictures.

        `BudgetExhausted` if no token of the model fits after it, or the record would have more than `max_pictures`.
        """

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append forced tokens; `BudgetExhausted` when they do not fit."""

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """
        Run one tool call under its deadline. A failure becomes a result with `error`, for the model.

        A result with `ends_episode` asks the agent to end the episode, once the other calls of the turn have ended.
        """

    async def open_tool(self, name: str) -> object:
        """
        Return the session that a tool has in this episode; it opens now if no call has opened it.

        An agent can use what its tools use; so can a reward with the method of `GradingReward`, after the episode.
        `ToolError` when the run has no such tool.
        """

    async def interact(self) -> Reply:
        """Ask the configured user simulator for its answer to `messages`."""

    def note_limit(self, name: str, value: int) -> None:
        """Note that the agent ends the episode by its own limit; `name` is the option, such as `max_turns`."""

    def note_outside_call(self, call: OutsideCall) -> None:
        """Note a call of the agent's program to another model than the policy; the result of the episode holds it."""

    def note_report(self, report: Report) -> None:
        """Note a text for people; the result of the episode holds it. Rewards may do so, too."""

    def record_metric(self, name: str, value: float) -> None:
        """Add to a number of this episode's metrics; a level or a maximum makes no sense as a sum."""


@runtime_checkable
class Agent(Protocol):
    """
    A state machine that turns a task into an episode.

    One object serves many episodes at once and keeps no state of any: notes go to `Episode.memory`.

    An agent that cannot repeat a step, because a program outside takes part in it, has the attribute `resumable` with
    the value False. An interrupted episode of it starts again from its task.
    """

    async def step(self, episode: Episode) -> State | str:
        """Make one transition from `episode.state` and return the next state; `State.TERMINATED` ends it."""


@runtime_checkable
class PromptingAgent(Protocol):
    """
    An agent whose first prompt depends on the task alone, so that a run can measure it before the first episode.

    Its first step begins a record with this prompt.
    """

    def first_prompt(self, task: Task) -> TokenArray | MediaTokens:
        """Return (P,) ids of the task's first prompt; threads call it at the same time. Raises `TemplateError`."""


@runtime_checkable
class EngineCheckingAgent(Protocol):
    """An agent whose options need an engine with some capability."""

    def check_engine(self, capabilities: Capabilities) -> None:
        """Raise `ConfigError` for an engine that the options exclude; called before the first episode of a run."""


@runtime_checkable
class ServingAgent(Protocol):
    """
    An agent with servers, which stay open between calls of the manager and while a trainer updates the weights.

    The runtime opens those of the config's `agent` when it starts, and others at their first episode.
    """

    async def open(self) -> Mapping[str, str]:
        """Listen on the running event loop; return the addresses by name, for `RolloutManager.addresses`."""

    async def close(self) -> None:
        """Close the servers; the agent may be opened again on another event loop. Also called after a failed `open`."""
