"""
Which episode to run, and the saved state of an interrupted one.

An interrupt falls into a step of the agent. The saved state is the episode as that step started, and the results of the
step so far: sampled turns, tool results and replies of the simulated user. A resumed episode repeats the step with
these results, so no finished tool call runs twice and no sampled token is lost (see `turnwise.episode.journal`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from attrs import define, evolve, field, fields, frozen

from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.trajectory import Trajectory
from turnwise.types import (
    FinishReason,
    GenerateResult,
    JsonObject,
    Message,
    Reply,
    SamplingParams,
    State,
    Task,
    ToolCall,
    ToolResult,
)

TurnPosition = tuple[int, int, int, int]
"""
Start of a turn: number of its record, from 1; tokens of that record; index of the path, or -1; tokens of the path, or
again of the record.
"""


@define(eq=False)
class Counters:
    """Running totals of an episode; `turnwise.episode.driver` turns them into `EpisodeMetrics`."""

    llm_s: float = 0.0
    tool_s: float = 0.0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_cached_tokens: int = 0
    tool_reward: float = 0.0
    num_sampled_tokens: int = 0
    extra: dict[str, float] = field(factory=dict)
    unappended: dict[str, int] = field(factory=dict)
    """Samples that were not appended, by the start of their turn."""
    turn_records: list[int] = field(factory=list)
    """The number of the record of each turn with tokens, from 0, in the order in which they were appended."""
    replicas: list[int] = field(factory=list)
    """The replicas that sampled turns, each once."""

    def add_sample(self, turn: RecordedTurn) -> None:
        self.llm_s += turn.seconds
        self.num_cached_tokens += turn.result.num_cached_tokens
        self.num_sampled_tokens += len(turn.result.token_ids)
        place = str(turn.position)
        self.unappended[place] = self.unappended.get(place, 0) + 1

    def add_turn(self, turn: RecordedTurn) -> None:
        """Count a sample as a turn, when it is appended."""
        self.unappended.pop(str(turn.position), None)
        if len(turn.result.token_ids):  # an abort may come before the first token
            self.turn_records.append(turn.position[0] - 1)
            if turn.result.replica not in self.replicas:
                self.replicas.append(turn.result.replica)

    def add_call(self, call: RecordedCall) -> None:
        result = call.result
        self.tool_s += call.seconds
        self.num_tool_calls += 1
        self.num_tool_errors += result.error
        self.tool_reward += result.reward or 0.0
        for name, value in result.metrics.items():
            self.add_extra(f"tool/{name}", value)

    def add_extra(self, name: str, value: float) -> None:
        """Add to a metric of the agent or a tool."""
        self.extra[name] = self.extra.get(name, 0.0) + value

    def mark(self) -> tuple[Any, ...]:
        """Return copies of the attributes, in their order: `Counters(*mark)` has the totals of this time."""
        containers = (self.extra.copy(), self.unappended.copy(), self.turn_records.copy(), self.replicas.copy())
        return (*_read_totals(self), *containers)


# All but the last four, which are containers.
_read_totals: Final = attrgetter(*[attribute.name for attribute in fields(Counters)[:-4]])


@frozen(kw_only=True, eq=False)
class RecordedTurn:
    """
    A turn that the engine returned within a step.

    Attributes:
        position: start of the turn in the records.
        result: as the engine returned it; finish reason `abort` means that the turn continues after a resume.
        seconds: time that the engine took.
    """

    position: TurnPosition
    result: GenerateResult
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return self.result.finish_reason.is_final


@frozen(kw_only=True, eq=False)
class RecordedCall:
    """A finished tool call of a step, and the seconds that it took."""

    call: ToolCall
    result: ToolResult
    seconds: float = 0.0


@frozen(kw_only=True)
class EpisodeSpec:
    """
    Which episode to run: a task, and the number of its rollout.

    Attributes:
        task: row of the data set.
        agent_name: agent that runs the task.
        rollout_n: number of the rollout in its group, from 0.
        global_step: training step of the request.
        validation: sample with the validation parameters.
        seed: seed of the run; every request derives its own from it.
        sampling: sampling parameters.
        num_members: number of episodes of its group in the interrupted call; 0 for an episode that was not interrupted.
        unfinished: saved state to resume from; None starts with the prompt.
    """

    task: Task
    agent_name: str
    rollout_n: int = 0
    global_step: int = 0
    validation: bool = False
    seed: int = 0
    sampling: SamplingParams = field(factory=SamplingParams)
    num_members: int = field(default=0, eq=False, repr=False)
    # Not compared and not shown: it has arrays, and specs are compared and logged by their names.
    unfinished: UnfinishedEpisode | None = field(default=None, eq=False, repr=False)

    @property
    def uid(self) -> str:
        """Name of the episode, unique in a step of the run."""
        return f"{self.task.uid}/{self.rollout_n}"

    @property
    def group(self) -> tuple[str, int, bool]:
        """Key of its group: task uid, training step, and whether it is a validation."""
        return self.task.uid, self.global_step, self.validation


@frozen(kw_only=True, eq=False)
class UnfinishedEpisode:
    """
    The saved state of an interrupted episode: the start of its last step, and the results of that step.

    Attributes:
        spec: which episode; its `unfinished` is None.
        started: whether its first step started; if not, all other attributes are empty.
        state: state of the agent at the start of the step.
        messages: conversation at the start of the step.
        memory: the agent's notes at the start of the step, JSON values.
        records: records at the start of the step; each may have an open block.
        turns: turns sampled in the step; the last ones may be incomplete.
        calls: tool calls finished in the step.
        replies: replies of the simulated user in the step.
        counters: totals at the start of the step.
        last_finish: finish reason of the last turn before the step.
        reached: the limit that ended that turn, or that the agent noted; None when there is none.
        objective: the agent's choice, see `turnwise.layout.Objective`; empty for the default.
        num_steps: number of earlier steps.
        spent_s: seconds that the episode has run, all parts together.
        released_reward: sum of the rewards that tools returned when their sessions were released.
        tool_notes: result of `suspend` by tool name, for the tools that have this method.
        interaction_notes: result of `suspend` of the simulated user, if it has this method.
        num_interruptions: number of interrupts so far.
    """

    spec: EpisodeSpec
    started: bool = True
    state: str = State.PENDING
    messages: tuple[Message, ...] = ()
    memory: JsonObject = field(factory=dict)
    records: tuple[EpisodeRecord, ...] = ()
    turns: tuple[RecordedTurn, ...] = ()
    calls: tuple[RecordedCall, ...] = ()
    replies: tuple[Reply, ...] = ()
    counters: Counters = field(factory=Counters)
    last_finish: FinishReason | None = None
    reached: ReachedLimit | None = None
    objective: str = ""
    num_steps: int = 0
    spent_s: float = 0.0
    released_reward: float = 0.0
    tool_notes: JsonObject = field(factory=dict)
    interaction_notes: object = None
    num_interruptions: int = 0

    @property
    def uid(self) -> str:
        return self.spec.uid

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The tokens of `records`."""
        return tuple(record.trajectory for record in self.records)

    @property
    def resumed_spec(self) -> EpisodeSpec:
        """The spec that continues this episode, or starts it if no step has started."""
        return evolve(self.spec, unfinished=self if self.started else None)
