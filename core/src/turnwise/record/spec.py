"""
Which episode to run, and the saved state of an interrupted one.

An interrupt falls into a step of the agent. The saved state is the episode as that step started, and the results of the
step so far: sampled turns, tool results and replies of the simulated user. A resumed episode repeats the step with
these results, so no finished tool call runs twice and no sampled token is lost (see `turnwise.episode.journal`).
"""

from __future__ import annotations

from attrs import evolve, field, frozen

from turnwise.errors import LostResourceError
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.step_results import Counters, RecordedCall, RecordedTurn
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.types import (
    Fault,
    FinishReason,
    JsonObject,
    Message,
    Reply,
    SamplingParams,
    State,
    Task,
)


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
        tries: attempts that it has, this one included, if it loses its workspace or another resource.
        num_losses: earlier attempts.
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
    tries: int = field(default=1, eq=False, repr=False)
    num_losses: int = field(default=0, eq=False, repr=False)

    @property
    def uid(self) -> str:
        """Name of the episode, unique in a step of the run."""
        return f"{self.task.uid}/{self.rollout_n}"

    def after(self, fault: Fault | None) -> EpisodeSpec | None:
        """Return the spec that runs the episode again after a fault; None if the fault, or none, is its end."""
        if self.tries < 2 or fault is None or fault.kind != LostResourceError.__name__:
            return None
        return evolve(self, tries=self.tries - 1, num_losses=self.num_losses + 1)

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
        reports: at the start of the step.
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
    reports: tuple[Report, ...] = ()
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
