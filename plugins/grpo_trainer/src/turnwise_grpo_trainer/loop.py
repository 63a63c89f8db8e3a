"""
The training loop: roll out, learn, bring the weights to the engine, again.

`sync` waits at each of these; `hybrid` does the same on shared devices, with the memory switch in between. What both
have in common with `async` (see `async_loop`) is here: a step's bookkeeping, validation, checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from attrs import define, field

from turnwise import EpisodeResult, RolloutManager, Task, UnfinishedEpisode
from turnwise.errors import TurnwiseError
from turnwise_grpo_trainer.buffer import EpisodeGroup, TrajectoryBuffer
from turnwise_grpo_trainer.credit import with_shuffled_rewards
from turnwise_grpo_trainer.live_view import TrainView
from turnwise_grpo_trainer.metric_log import MetricLog
from turnwise_grpo_trainer.numbers import episode_numbers, refuse_all_failed
from turnwise_grpo_trainer.setup import Setup
from turnwise_grpo_trainer.task_stream import TaskStream
from turnwise_grpo_trainer.trainers import Trainer


class TrainingInterruptedError(TurnwiseError):
    """The training was asked to stop; a checkpoint holds all that there was."""


@define(eq=False)
class Stages:
    """Seconds of the stages of one step, by name."""

    seconds: dict[str, float] = field(factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the body takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@define(eq=False)
class TrainLoop:
    """
    A training under way.

    Attributes:
        setup: what is trained, on what, and how.
        manager: started.
        trainer: holds the policy.
        log: started.
        view: shows how it goes.
        out: folder of the training.
        stream: of the tasks.
        buffer: where groups wait.
        step: steps that are done.
        version: of the policy's weights; the engine has them, too.
        train_s: seconds spent in steps so far.
        train_cpu_s: seconds of processor time of this process in steps so far; on a busy machine the better measure.
        validations: numbers of each validation, by step.
        interrupted: whether the training is to stop, see `interrupt`.
    """

    setup: Setup
    manager: RolloutManager
    trainer: Trainer
    log: MetricLog
    view: TrainView
    out: Path
    stream: TaskStream
    buffer: TrajectoryBuffer
    step: int = 0
    version: int = 0
    train_s: float = 0.0
    train_cpu_s: float = 0.0
    _cpu_mark: float = field(factory=time.process_time, init=False)
    validations: dict[int, dict[str, float]] = field(factory=dict)
    interrupted: bool = field(default=False, init=False)
    # Of the step that is being rolled out: places of its tasks, how often tasks were asked for, and what was cut.
    _order: dict[str, int] = field(factory=dict, init=False)
    _num_asked: int = field(default=0, init=False)
    _unfinished: list[UnfinishedEpisode] = field(factory=list, init=False)

    @classmethod
    def of(cls, setup: Setup, manager: RolloutManager, trainer: Trainer, log: MetricLog, view: TrainView) -> TrainLoop:
        """Stand before the first step."""
        train = setup.train
        buffer = TrajectoryBuffer(
            group_size=setup.group_size,
            max_groups=train.buffer.max_groups or 2 * train.tasks_per_step,
            max_staleness=train.buffer.max_staleness,
            stale=train.buffer.stale,
            dynamic_sampling=train.buffer.dynamic_sampling,
        )
        stream = TaskStream(setup.tasks, int(setup.run.rollout.seed))
        return cls(setup, manager, trainer, log, view, log.out, stream, buffer)

    # The loop

    def run(self) -> None:
        """
        Train until the last step.

        Raises:
            TrainingInterruptedError: after `interrupt`; a checkpoint was written.
        """
        try:
            if self._validation_is_due():
                self.validate()
            self.train()
        except TrainingInterruptedError:
            self.save()
            raise

    def train(self) -> None:
        """Make the steps that are left."""
        while self.step < self.setup.train.num_steps:
            stages, started = self.begin_step()
            with stages.timed("rollout"):
                groups = self.collect(self.step + 1)
            self.learn(groups, stages, started)

    def interrupt(self) -> None:
        """Stop soon: episodes are cut, an update is made to its end. May be called from a signal handler."""
        self.interrupted = True
        self.manager.abort()

    def stop_if_interrupted(self) -> None:
        """Raise `TrainingInterruptedError` after `interrupt`."""
        if self.interrupted:
            raise TrainingInterruptedError(f"interrupted after step {self.step}")

    def begin_step(self) -> tuple[Stages, float]:
        """Start the clocks of a step."""
        self._cpu_mark = time.process_time()
        return Stages(), time.perf_counter()

    def collect(self, step: int) -> list[EpisodeGroup]:
        """
        Roll out whole groups for a step, in the order of their tasks; fewer where refills do not help.

        What an interrupted training had of the step is gone on with.
        """
        train = self.setup.train
        if self._unfinished:
            self._roll_out([], step, self._unfinished)
        num_rounds = 1 + (train.buffer.max_refills if train.buffer.dynamic_sampling else 0)
        while self._num_asked < num_rounds:
            self.stop_if_interrupted()
            missing = train.tasks_per_step - len(self.buffer)
            tasks = self.stream.take(missing, without=self._order) if missing > 0 else []
            if not tasks:
                break
            self._num_asked += 1
            self._order |= {task.uid: len(self._order) + place for place, task in enumerate(tasks)}
            self._roll_out(tasks, step)
        groups = self.buffer.take(min(train.tasks_per_step, len(self.buffer)))
        order, self._order, self._num_asked = self._order, {}, 0
        for uid in order:
            self.buffer.forget((uid, step, False))  # where a prompt was dropped, the group stays incomplete
        # Groups come in the order in which they ended, which is never the same twice.
        return sorted(groups, key=lambda group: order.get(group.episodes[0].task.uid, -1))

    def _roll_out(self, tasks: Sequence[Task], step: int, resume: Sequence[UnfinishedEpisode] = ()) -> None:
        """Put the episodes of some tasks into the buffer; an interrupt keeps what is left of the others."""
        left: list[UnfinishedEpisode] = []
        for _number, episode in self.manager.numbered(tasks, global_step=step, resume=tuple(resume)):
            if self.interrupted and episode.unfinished is not None:
                left.append(episode.unfinished)
            else:
                self.buffer.put(episode)
                self.view.episode(episode)
        self._unfinished = left
        self.stop_if_interrupted()

    def learn(self, groups: Sequence[EpisodeGroup], stages: Stages, started: float) -> None:
        """Do what follows a rollout: update, bring the weights over, log, and what is due."""
        episodes = [episode for group in groups for episode in group.episodes]
        refuse_all_failed(episodes)
        numbers = episode_numbers(episodes) if episodes else {"tokens/action": 0.0}
        numbers["buffer/staleness"] = float(max(map(self.buffer.staleness, groups), default=0))
        if episodes:
            numbers |= self.update(episodes, stages)
            self.version += 1
            with stages.timed("sync"):
                numbers |= self.bring_weights()
        self.buffer.set_version(self.version)
        self.step += 1
        if not numbers.get("actor/trained_tokens"):
            counts = {name: count for name, count in self.buffer.counts.items() if name.startswith("dropped")}
            structlog.get_logger().warning(
                "a step without anything to learn from", step=self.step, episodes=len(episodes), **counts
            )
        self.train_s += time.perf_counter() - started
        self.train_cpu_s += time.process_time() - self._cpu_mark
        self._report(numbers, stages, time.perf_counter() - started)
        self._what_is_due()

    def update(self, episodes: Sequence[EpisodeResult], stages: Stages) -> dict[str, float]:
        """Learn from episodes and return numbers for the logs."""
        with stages.timed("collate"):
            batch = self.manager.collate(list(episodes))
            if self.setup.train.shuffle_rewards:
                batch = with_shuffled_rewards(batch, seed=self.step + 1)
        with stages.timed("update"):
            return self.trainer.update(batch, step=self.step + 1, version=self.version)

    def bring_weights(self) -> dict[str, float]:
        """Give the engine the policy's weights; return numbers for the logs."""
        report = self.manager.update_weights(self.trainer.weights(), version=self.version)
        return {"sync/bytes": float(report.num_bytes)}

    # What a step leaves behind

    def _report(self, numbers: dict[str, float], stages: Stages, step_s: float) -> None:
        numbers |= {f"seconds/{name}": seconds for name, seconds in stages.seconds.items()}
        numbers |= {f"buffer/{name}": float(count) for name, count in self.buffer.counts.items()}
        spent = stages.seconds.get("rollout", 0.0) + numbers.get("seconds/forward_backward", 0.0)
        numbers |= {
            "seconds/step": step_s,
            "seconds/overhead_share": max(0.0, step_s - spent - numbers.get("seconds/log_probs", 0.0)) / step_s,
            "seconds/train": self.train_s,
            "seconds/train_cpu": self.train_cpu_s,
            "tokens/per_s": numbers["tokens/action"] / step_s,
            "version": float(self.version),
        }
        self.log.write(self.step, numbers)
        self.view.step(self.step, numbers)

    def _what_is_due(self) -> None:
        train = self.setup.train
        if self._validation_is_due():
            self.validate()
        if self.step == train.num_steps or (train.checkpoint.every and self.step % train.checkpoint.every == 0):
            self.save()
        self.stop_if_interrupted()

    def _validation_is_due(self) -> bool:
        train, every = self.setup.train, self.setup.train.validation.every
        due = self.step in (0, train.num_steps) or (every and self.step % every == 0)
        return bool(due) and self.step not in self.validations

    def validate(self) -> None:
        """Run the held-out tasks and log how many were solved."""
        tasks = self.setup.validation_tasks[: self.setup.train.validation.limit]
        if not tasks:
            return
        started = time.perf_counter()
        episodes = self.manager.rollout(tasks, global_step=self.step, validation=True)
        self.stop_if_interrupted()
        refuse_all_failed(episodes)
        numbers = {f"validation/{name}": value for name, value in episode_numbers(episodes).items()}
        numbers["validation/seconds"] = time.perf_counter() - started
        self.validations[self.step] = numbers
        self.log.write(self.step, numbers)
        self.view.validation(self.step, numbers)

    def save(self) -> None:
        """Write a checkpoint."""
        from turnwise_grpo_trainer.checkpoints import save

        with self.view.paused("checkpoint"):
            save(self)

    # What a checkpoint holds besides the models

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Episodes that were cut; what had finished of their groups is in the buffer."""
        return tuple(self._unfinished)

    def go_on_with(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        """Take episodes that were cut when a checkpoint was written."""
        self._unfinished = list(unfinished)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "step": self.step,
            "version": self.version,
            "train_s": self.train_s,
            "train_cpu_s": self.train_cpu_s,
            "stream": self.stream.state_dict(),
            "order": dict(self._order),
            "num_asked": self._num_asked,
            "validations": [[step, numbers] for step, numbers in self.validations.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called; the engine is given the policy's weights."""
        self.step, self.version = state["step"], state["version"]
        self.train_s, self.train_cpu_s = state["train_s"], state["train_cpu_s"]
        self.stream.load_state_dict(state["stream"])
        self._order, self._num_asked = dict(state["order"]), state["num_asked"]
        self.validations = {int(step): dict(numbers) for step, numbers in state["validations"]}
        self.buffer.set_version(self.version)
        if self.version:
            self.manager.update_weights(self.trainer.weights(), version=self.version)
        structlog.get_logger().info("training goes on", step=self.step, version=self.version)
