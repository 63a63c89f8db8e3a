"""
A rollout worker and a weight transfer for TRL's AsyncGRPOTrainer (`trl.experimental.async_grpo`).

Episodes run while the trainer trains. A sample goes into the trainer's queue when its whole group has finished, with
the advantage that the group gives it, and with the oldest version of the weights that sampled any of its tokens.
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
    Fulfils TRL's `RolloutWorkerProtocol`. It goes through the tasks again and again until it is stopped.

    Attributes:
        manager: running; see `Rollouts.of`.
        tasks: in the order in which they are run.
        num_generations: episodes of a group.
        groups_in_flight: groups that run at the same time.
        queue_size: samples that wait for the trainer before the worker does.
        rollout_buffer: the samples.
        metrics_queue: numbers of each finished group, for the trainer's log.
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
        """Refuse groups that have no baseline, and begin with the first task."""
        if self.num_generations < 2:
            raise ConfigError(f"num_generations must be at least 2: {self.num_generations}")
        if not self.tasks:
            raise ConfigError("there are no tasks to run")
        self.rollout_buffer = queue.Queue(self.queue_size)
        self._groups = enumerate(itertools.cycle(self.tasks))

    def start(self) -> None:
        """Begin to run groups."""
        self._last_sample_at = time.monotonic()
        for number in range(self.groups_in_flight):
            thread = threading.Thread(target=self._produce, name=f"turnwise-rollouts-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End what runs, and wait for it."""
        self._stopping.set()
        self.manager.abort()
        for thread in self._threads:
            thread.join(timeout=60)
        self._threads.clear()

    def update_model_version(self, model_version: int) -> None:
        """Note the number that TRL gives to the weights that the engines have now."""
        self._version_offset = self.manager.weight_version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended a thread, or `TurnwiseError` when nothing came for so long."""
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
                # Each pass through the tasks is a step of its own, so that a task does not meet its old seeds again.
                results = self.manager.rollout([task] * self.num_generations, global_step=number // len(self.tasks))
                if not self._stopping.is_set():
                    self._put(samples_of(results, number, self._version_offset))
        except Exception as error:  # noqa: BLE001 - kept for the trainer, whose thread asks for it
            self._failure = error

    def _put(self, samples: list[Any]) -> None:
        if samples:
            self.metrics_queue.put({"rollout/reward": float(np.mean([s.metrics["reward"] for s in samples]))})
        for sample in samples:
            sample.enqueued_at = time.time()
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    continue
            self._last_sample_at = time.monotonic()


@define(eq=False)
class EngineWeights:
    """Fulfils TRL's `WeightTransferProtocol`: the manager pauses and resumes its engines around an update itself."""

    manager: RolloutManager

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Nothing to do: engines pause when the weights come."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Bring every tensor to the engines."""
        # A later step changes the trainer's tensors in place, while a transport may still read them.
        self.manager.update_weights((name, tensor.detach().to("cpu", copy=True)) for name, tensor in iterator)

    def resume(self) -> None:
        """Nothing to do."""

    def destroy(self) -> None:
        """Nothing to free: whoever made the manager stops it."""


def samples_of(results: Sequence[EpisodeResult], group_id: int, version_offset: int = 0) -> list[Any]:
    """
    Return the `RolloutSample`s of one group; an episode with several trajectories gives as many.

    The advantage of an episode is its reward less the group's mean, over the group's standard deviation (GRPO,
    arXiv:2402.03300). Episodes that failed or have no score count for nothing, and a group of which fewer than two
    remain gives no sample.

    Raises:
        ConfigError: a trajectory has parallel paths, which TRL's tree packing cannot hold.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    kept = [result for result in results if result.trainable and result.reward is not None]
    if len(kept) < 2:
        return []
    rewards = np.asarray([result.reward for result in kept], np.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + _MIN_STD)
    samples = []
    for result, advantage in zip(kept, advantages, strict=True):
        for trajectory in result.trajectories:
            if not trajectory.response_mask.any():
                continue
            if trajectory.path_start.any():
                raise ConfigError("TRL's AsyncGRPOTrainer cannot hold parallel paths: use TurnwiseGRPOTrainer")
            num_turns = float(result.metrics.num_turns)
            samples.append(
                RolloutSample(
                    prompt=list(result.task.messages),
                    completion=list(result.messages[len(result.task.messages) :]),
                    input_ids=np.asarray(trajectory.input_ids, np.int64),
                    completion_mask=_over_the_row(trajectory, trajectory.response_mask, np.int64),
                    old_log_probs=_over_the_row(trajectory, trajectory.logprobs, np.float32),
                    advantage=float(advantage),
                    model_version=_oldest_version(trajectory) - version_offset,
                    group_id=group_id,
                    metrics={"reward": float(result.reward or 0.0), "num_turns": num_turns},
                )
            )
    return samples


def _over_the_row(trajectory: Trajectory, values: Any, dtype: Any) -> Any:
    """Return (P + R,) values, zero on the prompt."""
    return np.concatenate([np.zeros(trajectory.num_prompt_tokens, dtype), np.asarray(values, dtype)])


def _oldest_version(trajectory: Trajectory) -> int:
    versions = np.asarray(trajectory.weight_versions)[np.asarray(trajectory.response_mask) == 1]
    return int(versions.min())
