"""An episode that has ended, as plain data: what a reward in another process reads."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from attrs import define, field

from turnwise.errors import TrajectoryError
from turnwise.protocols import Episode
from turnwise.trajectory import Trajectory
from turnwise.types import Message, Task


@define(eq=False, kw_only=True)
class EndedEpisode:
    """
    The part of a `turnwise.protocols.Episode` that can be read; what would continue it raises `TrajectoryError`.

    Attributes:
        task: the row.
        uid: name of the episode.
        rollout_n: which of its group's episodes it is.
        global_step: training step that asked for it.
        validation: whether it ran for validation.
        remaining_tokens: response tokens that still fitted.
        state: the agent's last.
        messages: the conversation.
        memory: the agent's notes.
        trajectories: every record, the last one being `trajectory`.
        recorded: what the reward added to the metrics, in order.
    """

    task: Task
    uid: str
    rollout_n: int
    global_step: int
    validation: bool
    remaining_tokens: int
    state: str
    messages: list[Message]
    memory: dict[str, Any]
    trajectories: list[Trajectory]
    recorded: list[tuple[str, float]] = field(factory=list)

    @classmethod
    def of(cls, episode: Episode) -> EndedEpisode:
        """Take down an episode whose agent has terminated."""
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
        )

    @property
    def trajectory(self) -> Trajectory:
        """The last token record."""
        return self.trajectories[-1]

    def record_metric(self, name: str, value: float) -> None:
        """Add to a number of the episode's metrics."""
        self.recorded.append((name, value))

    def as_episode(self) -> Episode:
        """Return itself as what a reward is given."""
        return cast("Episode", self)

    def begin(self, *_arguments: object, **_named: object) -> NoReturn:
        """Refuse: the episode has ended."""
        raise TrajectoryError(f"episode {self.uid} has ended: a reward can read it and not go on with it")

    generate = observe = force = call_tool = interact = begin
