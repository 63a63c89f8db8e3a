"""
What can be watched: events, and the class that a watcher overrides (in the way of trio's instruments).

Which methods a class overrides is looked at once, when it is added; an event that nobody overrides costs nothing.
Observers may not wait and may not change what they are given. One that raises is switched off and logged once.

Times of events are Unix seconds on a clock that never steps back within a process, see `unix_s`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from attrs import field, frozen

from turnwise.result import EpisodeResult
from turnwise.types import FinishReason, Task

Place = Literal["worker", "driver"]

_EPOCH_S: Final = time.time() - time.perf_counter()


def unix_s(perf_counter_s: float) -> float:
    """Return a reading of `time.perf_counter` as Unix seconds; differences stay as exact as the reading."""
    return _EPOCH_S + perf_counter_s


@frozen(kw_only=True)
class RunStarted:
    """A batch of episodes was asked for. `num_episodes` counts every rollout of every task."""

    num_episodes: int
    global_step: int
    validation: bool


@frozen(kw_only=True)
class EpisodeStarted:
    """
    An episode begins to run.

    Attributes:
        uid: of the episode: the task's `uid` and the number of the rollout.
        task: what it runs.
        agent_name: the agent that runs it.
        key: of this attempt, unique in all processes: an episode whose worker died runs again under another key.
        global_step: training step that asked for it.
        validation: whether it runs for validation.
        worker: name of the worker that runs it.
        started_at: Unix seconds.
    """

    uid: str
    task: Task
    agent_name: str
    key: str = ""
    global_step: int = 0
    validation: bool = False
    worker: str = ""
    started_at: float = 0.0


@frozen(kw_only=True)
class TurnFinished:
    """
    The engine answered: one turn of the model, or a part of one.

    Attributes:
        uid: of the episode.
        num_context_tokens: tokens that the engine was given.
        num_new_tokens: tokens that it sampled.
        num_cached_tokens: tokens of the context that came from a prefix cache.
        finish_reason: why it stopped.
        seconds: from asking to the answer, as the worker sees it.
        key: of the attempt, as in `EpisodeStarted`.
        worker: name of the worker that asked.
        replica: index of the replica that answered.
        started_at: Unix seconds when it was asked.
    """

    uid: str
    num_context_tokens: int
    num_new_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    seconds: float
    key: str = ""
    worker: str = ""
    replica: int = 0
    started_at: float = 0.0


@frozen(kw_only=True)
class ToolFinished:
    """
    A tool call ended.

    Attributes:
        uid: of the episode.
        tool: name that the model called, which need not be that of a tool.
        seconds: from the call to the answer.
        error: the model was shown an error.
        num_characters: length of the answer.
        key: of the attempt, as in `EpisodeStarted`.
        worker: name of the worker that ran it.
        started_at: Unix seconds of the call.
    """

    uid: str
    tool: str
    seconds: float
    error: bool
    num_characters: int
    key: str = ""
    worker: str = ""
    started_at: float = 0.0


@frozen(kw_only=True)
class RewardFinished:
    """
    An episode was scored.

    Attributes:
        uid: of the episode.
        reward: sum of its scores.
        seconds: that scoring took.
        key: of the attempt, as in `EpisodeStarted`.
        worker: name of the worker that ran the episode.
        started_at: Unix seconds when scoring began.
    """

    uid: str
    reward: float
    seconds: float
    key: str = ""
    worker: str = ""
    started_at: float = 0.0


RouteKind = Literal["first", "sticky", "moved"]


@frozen(kw_only=True)
class RequestRouted:
    """
    A router chose a replica for a request; a run with one engine in its own process has no router.

    Attributes:
        trajectory_id: of the record that the request belongs to.
        replica: index of the chosen replica.
        kind: `first` request of the episode, `sticky` when it stayed where it was, `moved` when it did not.
        reason: the router's own word for it, such as `prefix` or `overloaded`; `kind` for a router that has none.
        worker: name of the worker that asks.
    """

    trajectory_id: str
    replica: int
    kind: RouteKind
    reason: str
    worker: str = ""


@frozen(kw_only=True)
class LimitReached:
    """
    Something had to wait because a limit of the config was reached.

    Attributes:
        limit: path of the limit in the config, such as `rollout.max_in_flight`.
        count: how many episodes or requests had to wait.
        where: name of the worker or replica.
    """

    limit: str
    count: int = 1
    where: str = ""


@frozen(kw_only=True)
class ActorRestarted:
    """
    A worker or replica of another process was lost and is started again.

    Attributes:
        kind: `worker` or `replica`.
        index: which of its kind.
        reason: why it was lost, one line.
        restarts: how often it was restarted, this time included.
    """

    kind: str
    index: int
    reason: str
    restarts: int


@frozen(kw_only=True)
class EpisodesRetried:
    """Episodes are run again because their worker died: how many, whose, and why it died."""

    count: int
    worker: str
    reason: str


@frozen(kw_only=True)
class WeightsUpdated:
    """
    A replica serves new weights.

    Attributes:
        version: the weight version that it answers with from now on.
        seconds: from the first byte asked for until it served again.
        num_bytes: of the weights, 0 when that is not known.
        replica: index of the replica.
        started_at: Unix seconds.
    """

    version: int
    seconds: float
    num_bytes: int = 0
    replica: int = 0
    started_at: float = 0.0


@frozen(kw_only=True)
class MemorySwitched:
    """
    A stage of handing device memory to and fro has ended.

    Attributes:
        stage: what was done, such as `sleep`, `wake_up_weights`, `wake_up_kv_cache` or `offload_optimizer`.
        seconds: that it took.
        bytes_before: device memory in use before it.
        bytes_after: and after it.
        replica: index of the replica; -1 for the trainer's memory.
        started_at: Unix seconds.
    """

    stage: str
    seconds: float
    bytes_before: int = 0
    bytes_after: int = 0
    replica: int = 0
    started_at: float = 0.0


@frozen(kw_only=True)
class TrainingStarted:
    """
    A trainer in this process begins, or goes on from a checkpoint.

    Attributes:
        folder: of the training; what is kept for a resumed one may be written into it.
        settings: what was asked for, as plain values.
        resumed: whether it goes on.
    """

    folder: Path
    settings: Mapping[str, Any] = field(factory=dict)
    resumed: bool = False


@frozen(kw_only=True)
class MetricsLogged:
    """
    A trainer has numbers for its logs.

    Attributes:
        step: of the training. After a resume, steps that an interrupted training had logged may come again.
        values: numbers by name; those of a validation begin with `validation/`.
    """

    step: int
    values: Mapping[str, float]


class Observer:
    """
    Base of all observers: override what you want to hear.

    This class serves mostly as documentation; its own methods do nothing, and those of events are never called.

    Attributes:
        place: where it listens when workers have processes of their own: in each `worker`, beside what happens and at
            no cost, or once in the `driver`, to which the events that it overrides then travel with what finishes.
    """

    place: ClassVar[Place] = "worker"

    def open(self) -> None:
        """Get ready, before the first event: open files and ports here; what it raises stops the run."""

    def close(self) -> None:
        """Write what is left and free everything, after the last event; harmless a second time."""

    def on_run_started(self, event: RunStarted) -> None:
        """Hear that a batch was asked for."""

    def on_episode_started(self, event: EpisodeStarted) -> None:
        """Hear that an episode begins."""

    def on_turn_finished(self, event: TurnFinished) -> None:
        """Hear what one generate call gave."""

    def on_tool_finished(self, event: ToolFinished) -> None:
        """Hear how a tool call ended."""

    def on_reward_finished(self, event: RewardFinished) -> None:
        """Hear an episode's score."""

    def on_request_routed(self, event: RequestRouted) -> None:
        """Hear which replica a router chose."""

    def on_limit_reached(self, event: LimitReached) -> None:
        """Hear that something waits because of a limit."""

    def on_actor_restarted(self, event: ActorRestarted) -> None:
        """Hear that a worker or replica is started again."""

    def on_episodes_retried(self, event: EpisodesRetried) -> None:
        """Hear that episodes are run again."""

    def on_weights_updated(self, event: WeightsUpdated) -> None:
        """Hear that a replica serves new weights."""

    def on_memory_switched(self, event: MemorySwitched) -> None:
        """Hear that a stage of switching memory has ended."""

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Hear the result of an episode, of every status."""

    def on_training_started(self, event: TrainingStarted) -> None:
        """Hear, in the driver, that a trainer begins."""

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        """Hear, in the driver, the numbers of a trainer's step or validation."""
