"""A finished episode as plain data, for a reward in another process."""

from __future__ import annotations

from typing import NoReturn, cast

from attrs import define, field

from turnwise.errors import TrajectoryError
from turnwise.protocols import Episode
from turnwise.record.lineage import RecordLineage
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.types import JsonDict, Message, Task


@define(eq=False, kw_only=True)
class EpisodeSnapshot:
    """
    The readable part of a `turnwise.protocols.Episode`; methods that would continue the episode raise an error.

    `recorded` are the metrics and `reports` the texts that the reward added, in order.
    """

    task: Task
    uid: str
    rollout_n: int
    global_step: int
    validation: bool
    remaining_tokens: int
    state: str
    messages: list[Message]
    memory: JsonDict
    trajectories: list[Trajectory]
    turn_records: tuple[int, ...] = ()
    lineage: tuple[RecordLineage, ...] = ()
    key: str = ""
    recorded: list[tuple[str, float]] = field(factory=list)
    reports: list[Report] = field(factory=list)

    @classmethod
    def of(cls, episode: Episode) -> EpisodeSnapshot:
        """Return a snapshot of an episode whose agent has terminated."""
        trajectories = getattr(episode, "trajectories", None) or [episode.trajectory]
        return cls(
            task=episode.task,
            uid=episode.uid,
            rollout_n=episode.rollout_n,
            global_step=episode.global_step,
            validation=episode.validation,
            remaining_tokens=episode.remaining_tokens,
            state=str(episode.state),
            messages=list(episode.messages),
            memory=episode.memory,
            trajectories=list(trajectories),
            turn_records=tuple(episode.turn_records),
            lineage=tuple(episode.lineage),
            key=getattr(episode, "key", ""),
        )

    @property
    def trajectory(self) -> Trajectory:
        """The last token record."""
        return self.trajectories[-1]

    def record_metric(self, name: str, value: float) -> None:
        """Add to a metric of the episode."""
        self.recorded.append((name, value))

    def note_report(self, report: Report) -> None:
        """Note a text for people."""
        self.reports.append(report)

    def as_episode(self) -> Episode:
        """Return the snapshot, typed as the argument of a reward."""
        return cast("Episode", self)

    def begin(self, *_arguments: object, **_named: object) -> NoReturn:
        """Raise `TrajectoryError`: the episode is finished."""
        raise TrajectoryError(f"episode {self.uid} is finished: a reward can read it but not continue it")

    generate = sample = append = observe = force = call_tool = interact = begin
    branch = close_record = describe_record = note_outside_call = begin
