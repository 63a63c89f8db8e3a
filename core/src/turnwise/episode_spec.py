"""
Which episode to run, and what is kept of one that was cut short, so that it can go on later.

A cut falls into a step of the agent. Kept is where the step began, and what had come of it since: sampled turns, tool
answers and answers of the simulated user. The step is then made again; what is kept answers in place of the world, so
no finished call runs twice and no sampled token is lost (see `turnwise.journal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, evolve, field, frozen

from turnwise.trajectory import Trajectory
from turnwise.types import FinishReason, GenerateResult, Message, SamplingParams, State, Task, ToolCall, ToolResult

TurnPlace = tuple[int, int, int, int]
"""Where a turn begins: number of records, tokens of the last, index of the path or -1, tokens of the record or path."""


@define(eq=False)
class Counters:
    """What an episode has used so far; `turnwise.driver` turns it into `EpisodeMetrics`."""

    llm_s: float = 0.0
    tool_s: float = 0.0
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_cached_tokens: int = 0
    tool_reward: float = 0.0
    extra: dict[str, float] = field(factory=dict)

    def copy(self) -> Counters:
        """Return the same numbers in an object of their own."""
        return Counters(
            self.llm_s,
            self.tool_s,
            self.num_turns,
            self.num_tool_calls,
            self.num_tool_errors,
            self.num_cached_tokens,
            self.tool_reward,
            dict(self.extra),
        )


@frozen(kw_only=True, eq=False)
class KeptTurn:
    """
    What the engine answered within a step, or had sampled when it was cut.

    Attributes:
        place: where in the records it belongs.
        result: as the engine returned it; one that ends in `abort` is continued.
        seconds: that it took.
    """

    place: TurnPlace
    result: GenerateResult
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the turn had ended."""
        return self.result.finish_reason is not FinishReason.ABORT


@frozen(kw_only=True, eq=False)
class KeptCall:
    """A tool call that had been answered within a step, and the seconds it took."""

    call: ToolCall
    result: ToolResult
    seconds: float = 0.0


@frozen(kw_only=True, eq=False)
class KeptReply:
    """What the simulated user had answered within a step; the attributes are those of `turnwise.protocols.Reply`."""

    content: str = ""
    should_terminate: bool = False
    reward: float | None = None


@frozen(kw_only=True)
class EpisodeSpec:
    """
    Which episode to run: a task, and which of its group's rollouts.

    Attributes:
        task: the row.
        agent_name: the agent that runs it.
        rollout_n: number of the rollout in its group, from 0.
        global_step: training step that asked for it.
        validation: whether it samples with the validation parameters.
        seed: of the run; every request derives its own.
        sampling: how tokens are drawn.
        unfinished: what it goes on from; None begins at the prompt.
    """

    task: Task
    agent_name: str
    rollout_n: int = 0
    global_step: int = 0
    validation: bool = False
    seed: int = 0
    sampling: SamplingParams = field(factory=SamplingParams)
    unfinished: UnfinishedEpisode | None = field(default=None, eq=False, repr=False)

    @property
    def uid(self) -> str:
        """Name of the episode, unique in the run's step."""
        return f"{self.task.uid}/{self.rollout_n}"


@frozen(kw_only=True, eq=False)
class UnfinishedEpisode:
    """
    An episode that was cut: where its last step began, and what had come of that step.

    Attributes:
        spec: which episode; its `unfinished` is None.
        began: whether its first step was begun; if not, all else is empty.
        state: of the agent's machine when the step began.
        messages: the conversation then.
        memory: the agent's notes then, JSON values.
        trajectories: the records then; the last one may have a block open.
        turns: what was sampled in the step.
        calls: tool calls that were answered in the step.
        replies: answers of the simulated user in the step.
        counters: what had been used when the step began.
        last_finish: why the last turn before the step stopped.
        objective: that the agent had chosen, see `turnwise.layout.Objective`; empty when it had not.
        num_steps: steps made before.
        spent_s: seconds that the episode has run, over all its parts.
        released_reward: what the sessions gave that were released when it was cut.
        tool_notes: by tool, what `Tool.suspend` returned, for those tools that have it.
        interaction_notes: the same of the simulated user.
        num_cuts: how often it has been cut.
    """

    spec: EpisodeSpec
    began: bool = True
    state: str = State.PENDING
    messages: tuple[Message, ...] = ()
    memory: Mapping[str, Any] = field(factory=dict)
    trajectories: tuple[Trajectory, ...] = ()
    turns: tuple[KeptTurn, ...] = ()
    calls: tuple[KeptCall, ...] = ()
    replies: tuple[KeptReply, ...] = ()
    counters: Counters = field(factory=Counters)
    last_finish: FinishReason | None = None
    objective: str = ""
    num_steps: int = 0
    spent_s: float = 0.0
    released_reward: float = 0.0
    tool_notes: Mapping[str, Any] = field(factory=dict)
    interaction_notes: Any = None
    num_cuts: int = 0

    @property
    def uid(self) -> str:
        """Name of the episode."""
        return self.spec.uid

    @property
    def num_kept_tokens(self) -> int:
        """Sampled tokens that will not be sampled again."""
        records = (record for trajectory in self.trajectories for record in (trajectory, *trajectory.open_paths))
        in_records = sum(len(record.sampled()[0]) for record in records)
        return in_records + sum(len(turn.result.token_ids) for turn in self.turns)

    @property
    def resumed_spec(self) -> EpisodeSpec:
        """What to run so that it goes on; an episode that never began is begun."""
        return evolve(self.spec, unfinished=self if self.began else None)
