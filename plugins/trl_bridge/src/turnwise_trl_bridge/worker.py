"""
A rollout worker and a weight transfer for TRL's AsyncGRPOTrainer (`trl.experimental.async_grpo`).

Episodes run while the trainer trains. When a group has finished, its samples enter the trainer's queue, each with its
group-relative advantage and with the oldest weight version among its tokens.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from turnwise import EpisodeResult, RolloutManager, Task, Trajectory
from turnwise.errors import ConfigError, TurnwiseError

_MIN_STD = 1e-4


@define(eq=False)
class RolloutWorker:
    """
    Implements TRL's `RolloutWorkerProtocol`: cycles through the tasks until it is stopped.

    Attributes:
        manager: a running manager; see `Rollouts.from_config`.
        tasks: tasks in the order of the rollouts.
        num_generations: episodes per group.
        groups_in_flight: groups that run concurrently.
        queue_size: capacity of `rollout_buffer`; the worker blocks when it is full.
        rollout_buffer: finished samples.
        metrics_queue: metrics of each finished group, for the trainer's log.
    """

    manager: RolloutManager
    tasks: Sequence[Task]
    num_generations: int = 8
    groups_in_flight: int = 8
    queue_size: int = 1024
    rollout_buffer: queue.Queue[Any] = field(init=False)
    metrics_queue: queue.Queue[Any] = field(factory=queue.Queue, init=False)
    _threads: list[threading.Thread] = field(factory=list, init=False)
    _stopping: threading.Event = field(factory=threading.Event, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _last_sample_at: float = field(factory=time.monotonic, init=False)
    _version_offset: int = field(default=0, init=False)
    _groups: Iterator[tuple[int, Task]] = field(init=False)
    _next_group: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the settings and create the queue."""
        if self.num_generations < 2:
            raise ConfigError(f"num_generations must be at least 2, got {self.num_generations}")
        if not self.tasks:
            raise ConfigError("tasks is empty: give the worker at least one task")
        self.rollout_buffer = queue.Queue(self.queue_size)
        self._groups = enumerate(itertools.cycle(self.tasks))

    def start(self) -> None:
        """Start the threads that run groups."""
        self._last_sample_at = time.monotonic()
        for number in range(self.groups_in_flight):
            thread = threading.Thread(target=self._produce, name=f"turnwise-rollouts-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Abort the running episodes and wait for the threads."""
        self._stopping.set()
        self.manager.abort()
        for thread in self._threads:
            thread.join(timeout=60)
        self._threads.clear()

    def update_model_version(self, model_version: int) -> None:
        """Record TRL's version number of the engines' current weights."""
        self._version_offset = self.manager.weight_version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `TurnwiseError` if a thread failed or no sample arrived for `stale_after_s` seconds."""
        if self._failure is not None:
            raise TurnwiseError(f"turnwise rollouts stopped: {self._failure}") from self._failure
        idle_s = time.monotonic() - self._last_sample_at
        if idle_s > stale_after_s and self.rollout_buffer.empty():
            raise TurnwiseError(f"no group of episodes has finished for {idle_s:.0f} s")

    def _produce(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._next_group:
                    number, task = next(self._groups)
                # Seeds depend on the step: with a new step for each pass a task does not repeat its old episodes.
                results = self.manager.rollout([task] * self.num_generations, global_step=number // len(self.tasks))
                if not self._stopping.is_set():
                    self._enqueue(build_samples(results, number, self._version_offset))
        except Exception as error:  # noqa: BLE001 - the trainer's thread raises it in check_health
            self._failure = error

    def _enqueue(self, samples: list[Any]) -> None:
        if samples:
            self.metrics_queue.put({"rollout/reward": float(np.mean([s.metrics["reward"] for s in samples]))})
        for sample in samples:
            sample.enqueued_at = time.time()
            # A timeout and not a blocking put: `stop` must end a thread that waits for a full queue.
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    continue
            self._last_sample_at = time.monotonic()


@define(eq=False)
class EngineWeights:
    """Implements TRL's `WeightTransferProtocol`; the manager pauses and resumes its engines around an update."""

    manager: RolloutManager

    def init_weight_transfer(self) -> None:
        """Do nothing: there is nothing to set up."""

    def pause(self) -> None:
        """Do nothing: the manager pauses the engines for the update."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Send all tensors to the engines."""
        # The next optimizer step changes the tensors in place, while a transport may still read them: send copies.
        self.manager.update_weights((name, tensor.detach().to("cpu", copy=True)) for name, tensor in iterator)

    def resume(self) -> None:
        """Do nothing: the manager resumes the engines after the update."""

    def destroy(self) -> None:
        """Do nothing: the caller stops the manager."""


def build_samples(results: Sequence[EpisodeResult], group_id: int, version_offset: int = 0) -> list[Any]:
    """
    Build the `RolloutSample`s of one group, one per trajectory.

    The advantage of an episode is its reward minus the group's mean, divided by the group's standard deviation (GRPO,
    arXiv:2402.03300). Episodes that failed or have no score are ignored; a group with fewer than two remaining episodes
    gives no sample.

    Raises:
        ConfigError: a trajectory has parallel paths, which TRL's tree packing does not support, or pictures.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if any(record.pictures for result in results for record in result.trajectories):
        raise ConfigError("the samples for TRL have no place for pictures: use TurnwiseGRPOTrainer")
    kept = [result for result in results if result.trainable and result.reward is not None]
    if len(kept) < 2:
        return []
    rewards = np.asarray([result.reward for result in kept], np.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + _MIN_STD)
    samples = []
    for result, advantage in zip(kept, advantages, strict=True):
        for trajectory in itertools.compress(result.trajectories, result.trained):
            if not trajectory.response_mask.any():
                continue
            if trajectory.path_start.any():
                raise ConfigError("TRL's AsyncGRPOTrainer does not support parallel paths: use TurnwiseGRPOTrainer")
            num_turns = float(result.metrics.num_turns)
            samples.append(
                RolloutSample(
                    prompt=list(result.task.messages),
                    completion=list(result.messages[len(result.task.messages) :]),
                    input_ids=np.asarray(trajectory.input_ids, np.int64),
                    completion_mask=_pad_prompt(trajectory, trajectory.response_mask, np.int64),
                    old_log_probs=_pad_prompt(trajectory, trajectory.logprobs, np.float32),
                    advantage=float(advantage),
                    model_version=_oldest_version(trajectory) - version_offset,
                    group_id=group_id,
                    metrics={"reward": float(result.reward or 0.0), "num_turns": num_turns},
                )
            )
    return samples


def _pad_prompt(trajectory: Trajectory, values: Any, dtype: Any) -> Any:
    """Return (P + R,) values that are zero on the prompt."""
    return np.concatenate([np.zeros(trajectory.num_prompt_tokens, dtype), np.asarray(values, dtype)])


def _oldest_version(trajectory: Trajectory) -> int:
    versions = np.asarray(trajectory.weight_versions)[np.asarray(trajectory.response_mask) == 1]
    return int(versions.min())
