"""The result of an episode: the only data that a worker sends to the driver."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.errors import TrajectoryError
from turnwise.layout import Objective
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import RecordLineage
from turnwise.record.outside_call import OutsideCall
from turnwise.record.spec import UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.types import (
    EpisodeMetrics,
    Fault,
    FloatArray,
    Message,
    Placement,
    Score,
    Status,
    Task,
    TokenScore,
    TrajectoryScore,
    TurnScore,
)


@frozen(kw_only=True, eq=False)
class EpisodeResult:
    """
    One finished episode, of any status.

    Attributes:
        task: that it ran.
        rollout_n: number of the episode within its group, from 0.
        global_step: training step that asked for it.
        validation: whether it ran with the validation sampling parameters.
        agent_name: the agent that ran it.
        status: how it ended.
        fault: the reason, for every status but completed and plain truncation.
        limit: the limit that ended it: of every truncated episode, and of a completed one whose agent counts to a
            own limit, such as `max_turns`. None when no limit ended it, or when it is not known.
        trajectories: one or more records; none when it failed before its prompt was made.
        scores: one per trajectory, empty when it was not scored.
        messages: the conversation as text.
        objective: way of sampling of records with blocks; meaningless for other records.
        lineage: relation of each trajectory to the others; empty without a described or branched record.
        metrics: counts and wall-clock times.
        outside_calls: calls of the agent's program to other models than the policy, in the order of their ends.
        reports: texts for people, of tools, of the agent and of the reward, in their order.
        unfinished: state from which an aborted episode can resume; see `RolloutManager.unfinished`.
        key: of the attempt, by which logs, events and spans name the episode; empty for one that did not run.
        worker: name of the worker that ran it.
    """

    task: Task
    rollout_n: int = 0
    global_step: int = 0
    validation: bool = False
    agent_name: str = ""
    status: Status = field(converter=Status)
    fault: Fault | None = None
    limit: ReachedLimit | None = None
    trajectories: tuple[Trajectory, ...] = ()
    scores: tuple[Score, ...] = ()
    messages: tuple[Message, ...] = ()
    objective: Objective = field(default=Objective.EXACT, converter=Objective)
    lineage: tuple[RecordLineage, ...] = ()
    metrics: EpisodeMetrics = field(factory=EpisodeMetrics)
    outside_calls: tuple[OutsideCall, ...] = ()
    reports: tuple[Report, ...] = ()
    unfinished: UnfinishedEpisode | None = None
    key: str = ""
    worker: str = ""

    @property
    def uid(self) -> str:
        """Name of the episode, unique in the run's step."""
        return f"{self.task.uid}/{self.rollout_n}"

    @property
    def reward(self) -> float | None:
        """Sum of all scores; None when it was not scored."""
        return sum(map(total_score, self.scores)) if self.scores else None

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether a batch has rows of each trajectory."""
        return tuple(line.trained for line in self.lineage) or (True,) * len(self.trajectories)

    @property
    def trainable(self) -> bool:
        """Whether its tokens may enter the loss: a failed episode says nothing about the policy."""
        return self.status is not Status.FAILED


def as_score(value: object) -> Score:
    """
    Return a score; a number, also one in an array or tensor without dimensions, is the score of a whole trajectory.

    Raises:
        TypeError: the value is neither.
    """
    if isinstance(value, TrajectoryScore | TurnScore | TokenScore):
        return value
    # Torch is not imported here, so its tensors are known by their form.
    number = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(number, Real):
        return TrajectoryScore(value=float(number))
    raise TypeError(f"score returned {value!r}, expected a number, TrajectoryScore, TurnScore or TokenScore")


def total_score(score: Score) -> float:
    """Return the sum of a score's values."""
    return score.value if isinstance(score, TrajectoryScore) else float(sum(score.values))


def token_scores(score: Score, trajectory: Trajectory) -> FloatArray:
    """Return (R,) float32 scores of the response tokens; `TrajectoryError` for a score that does not fit them."""
    num_tokens = trajectory.num_response_tokens
    if isinstance(score, TokenScore):
        values = np.asarray(score.values, np.float32)
        if values.shape != (num_tokens,):
            raise TrajectoryError(f"{len(values)} token scores for {num_tokens} response tokens")
        if values[trajectory.response_mask == 0].any():
            raise TrajectoryError("a token score is not 0 on a token that the policy did not sample")
        return values
    values = np.zeros(num_tokens, np.float32)
    if num_tokens == 0:
        return values
    start, mask = trajectory.num_prompt_tokens, trajectory.response_mask
    ends = scored_tokens([(first - start, stop - start) for first, stop in trajectory.turns()], mask)
    if isinstance(score, TrajectoryScore):
        values[ends.max(initial=-1) if score.at is Placement.LAST_ACTION else -1] = score.value
        return values
    if len(ends) != len(score.values):
        raise TrajectoryError(f"{len(score.values)} turn scores for {len(ends)} turns")
    np.add.at(values, ends, np.asarray(score.values, np.float32))  # turns may share a token
    return values


def scored_tokens(turns: Sequence[tuple[int, int]], mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """
    Return the index of the token that has the score of each turn.

    It is the turn's last action. A constrained turn has none: then it is the last action before the turn, or else that
    of the first turn with one, because a trainer may not read the score of a token that it does not train.

    Args:
        turns: start and stop of each turn in the response.
        mask: (R,) of the response.
    """
    ends = np.array([stop - 1 for _start, stop in turns], np.int64)
    actions = np.flatnonzero(mask)
    if len(actions) == 0 or mask[ends].all():
        return ends
    before = np.searchsorted(actions, ends, side="right") - 1
    first = next(end for end in ends if end >= actions[0])
    return np.where(before < 0, actions[np.searchsorted(actions, first, side="right") - 1], actions[before])
