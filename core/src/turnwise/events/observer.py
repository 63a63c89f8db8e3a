"""
Events of a run, and the base class of observers (modelled on trio's instruments).

The dispatcher inspects an observer's overridden methods once, when it is added; an event without a listener costs
nothing. Observers must not block and must not change events. An observer that raises is switched off and logged once.

Times of events are Unix seconds on a clock that never steps back within a process, see `unix_s`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from inspect import iscoroutinefunction
from pathlib import Path
from typing import ClassVar, Final, Literal

from attrs import field, frozen

from turnwise.record.result import EpisodeResult
from turnwise.types import FinishReason, JsonObject, Task

Place = Literal["worker", "driver"]

_EPOCH_S: Final = time.time() - time.perf_counter()


def unix_s(perf_counter_s: float) -> float:
    """Return a reading of `time.perf_counter` as Unix seconds; differences stay as exact as the reading."""
    return _EPOCH_S + perf_counter_s


@frozen(kw_only=True)
class RunStarted:
    """A batch of episodes was submitted. `num_episodes` counts every rollout of every task."""

    num_episodes: int
    global_step: int
    validation: bool


@frozen(kw_only=True)
class EpisodeEvent:
    """
    The common part of the events of an episode, of its turns, tool calls and scoring.

    Attributes:
        uid: of the episode: the task's `uid` and the number of the rollout.
        key: of the attempt, unique in all processes; an episode whose worker died runs again under a new key.
        worker: name of the worker that runs it.
        started_at: Unix seconds of the start of the episode, the request, the call or scoring.
    """

    uid: str
    key: str = ""
    worker: str = ""
    started_at: float = 0.0


@frozen(kw_only=True)
class EpisodeStarted(EpisodeEvent):
    """
    An episode started.

    Attributes:
        task: that it runs.
        agent_name: the agent that runs it.
        global_step: training step that asked for it.
        validation: whether it runs for validation.
        rollout_n: number of the episode within its group, from 0.
    """

    task: Task
    agent_name: str
    global_step: int = 0
    validation: bool = False
    rollout_n: int = 0


@frozen(kw_only=True)
class TurnFinished(EpisodeEvent):
    """
    A generate call finished: one turn of the model, or a part of one.

    Attributes:
        num_context_tokens: tokens of the context.
        num_new_tokens: sampled tokens.
        num_cached_tokens: tokens of the context that came from a prefix cache.
        finish_reason: the reason why it stopped.
        seconds: from the request to the result, as the worker sees it.
        replica: index of the replica that served it.
    """

    num_context_tokens: int
    num_new_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    seconds: float
    replica: int = 0


@frozen(kw_only=True)
class ToolFinished(EpisodeEvent):
    """
    A tool call ended.

    Attributes:
        tool: name that the model called; it need not exist.
        seconds: from the call to its result.
        error: the result is an error.
        num_characters: length of the result's text.
    """

    tool: str
    seconds: float
    error: bool
    num_characters: int


@frozen(kw_only=True)
class RewardFinished(EpisodeEvent):
    """
    An episode was scored.

    Attributes:
        reward: sum of its scores.
        seconds: that scoring took.
    """

    reward: float
    seconds: float


RouteKind = Literal["first", "sticky", "migrated"]


@frozen(kw_only=True)
class RequestRouted:
    """
    A router chose a replica for a request; a run with one engine in the same process has no router.

    Attributes:
        trajectory_id: of the record that the request belongs to.
        replica: index of the chosen replica.
        kind: `first` request of the episode, `sticky` when the episode stayed on its replica, `migrated` otherwise.
        reason: the router's reason, such as `prefix` or `overloaded`; `kind` for a router that gives none.
        worker: name of the worker that asks.
        key: of the episode.
    """

    trajectory_id: str
    replica: int
    kind: RouteKind
    reason: str
    worker: str = ""
    key: str = ""


@frozen(kw_only=True)
class LimitReached:
    """
    Episodes or requests had to wait because of a limit in the config.

    Attributes:
        limit: path of the limit in the config, such as `rollout.max_in_flight`.
        count: episodes or requests that had to wait.
        where: name of the worker or replica.
    """

    limit: str
    count: int = 1
    where: str = ""


@frozen(kw_only=True)
class ActorRestarted:
    """
    A worker or replica in another process died and is restarted.

    Attributes:
        kind: `worker` or `replica`.
        index: of the worker or replica.
        reason: of the loss, one line.
        restarts: number of its restarts, including this one.
    """

    kind: str
    index: int
    reason: str
    restarts: int


@frozen(kw_only=True)
class EpisodesRetried:
    """
    Episodes run again: their count, and the reason.

    `worker` is the one that died; it is empty if an episode lost something else, such as its workspace.
    """

    count: int
    worker: str
    reason: str


@frozen(kw_only=True)
class WeightsUpdated:
    """
    A replica serves new weights.

    Attributes:
        version: weight version of its results from now on.
        seconds: from the first requested byte until it served again.
        num_bytes: of the weights, 0 when unknown.
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
    A stage of a memory switch between engines and trainer ended.

    Attributes:
        stage: its name, such as `sleep`, `wake_up_weights`, `wake_up_kv_cache` or `offload_optimizer`.
        seconds: its duration.
        bytes_before: device memory in use before.
        bytes_after: device memory in use after.
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
class Wait:
    """
    Episodes that wait for the same part of a run.

    Attributes:
        part: such as `engine`, `replica 1`, `tool 'search'`, `reward Judge` or `agent 'external'`.
        num_episodes: that wait; 0 where the run itself does.
        seconds: of the longest wait.
        shortest_s: seconds of the shortest wait.
        uid: of the episode that waits longest.
        worker: that runs this episode.
    """

    part: str
    num_episodes: int = 0
    seconds: float = 0.0
    shortest_s: float = 0.0
    uid: str = ""
    worker: str = ""

    def __str__(self) -> str:
        count = f"{self.num_episodes} episode{'s' if self.num_episodes > 1 else ''}: " if self.num_episodes else ""
        longest = f", longest {self.uid} on {self.worker}" if self.uid else ""
        return f"{count}{self.part} for {self.seconds:.0f} s{longest}"


@frozen(kw_only=True)
class RunWaiting:
    """
    A run has had no event for some time: everything waits.

    Attributes:
        seconds: without an event; 0 when the run continues.
        waits: the parts that it waits for, the longest wait first.
    """

    seconds: float
    waits: tuple[Wait, ...] = ()


@frozen(kw_only=True)
class TrainingStarted:
    """
    A trainer in this process starts, or resumes from a checkpoint.

    Attributes:
        folder: of the training; observers may keep files for a resumed training in it.
        settings: options of the training, as plain values.
        resumed: whether it resumes.
    """

    folder: Path
    settings: JsonObject = field(factory=dict)
    resumed: bool = False


@frozen(kw_only=True)
class MetricsLogged:
    """
    A trainer has numbers for its logs.

    Attributes:
        step: of the training. After a resume, steps of the interrupted training may repeat.
        values: numbers by name; names of a validation start with `validation/`.
    """

    step: int
    values: Mapping[str, float]


class Observer:
    """
    Base class of all observers: override the methods of the events to receive.

    Each method receives an event of the class in its signature. One that is async, or of no event, is a `TypeError`.

    Attributes:
        place: process of the observer when workers have separate processes: in each `worker`, at no cost, or once in
            the `driver`, to which workers then send the events that it overrides, together with their results.
    """

    place: ClassVar[Place] = "worker"

    def __init_subclass__(cls) -> None:
        for name in [each for each in vars(cls) if each.startswith("on_")]:
            if name not in vars(Observer) or iscoroutinefunction(getattr(cls, name)):
                raise TypeError(f"{cls.__name__}.{name} would never be called: it is async, or of no event")

    def open(self) -> None:
        """Called before the first event: open files and ports here; an exception stops the run."""

    def close(self) -> None:
        """Called after the last event: flush and free everything; a second call must do nothing."""

    def on_run_started(self, event: RunStarted) -> None: ...
    def on_episode_started(self, event: EpisodeStarted) -> None: ...
    def on_turn_finished(self, event: TurnFinished) -> None: ...
    def on_tool_finished(self, event: ToolFinished) -> None: ...
    def on_reward_finished(self, event: RewardFinished) -> None: ...
    def on_request_routed(self, event: RequestRouted) -> None: ...
    def on_limit_reached(self, event: LimitReached) -> None: ...
    def on_actor_restarted(self, event: ActorRestarted) -> None: ...
    def on_episodes_retried(self, event: EpisodesRetried) -> None: ...
    def on_weights_updated(self, event: WeightsUpdated) -> None: ...
    def on_memory_switched(self, event: MemorySwitched) -> None: ...
    def on_episode_finished(self, event: EpisodeResult) -> None: ...
    def on_run_waiting(self, event: RunWaiting) -> None: ...
    def on_training_started(self, event: TrainingStarted) -> None: ...
    def on_metrics_logged(self, event: MetricsLogged) -> None: ...
