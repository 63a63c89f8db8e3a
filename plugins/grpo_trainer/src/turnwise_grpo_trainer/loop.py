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

from turnwise import EpisodeResult, RolloutManager
from turnwise_grpo_trainer.buffer import EpisodeGroup, TrajectoryBuffer
from turnwise_grpo_trainer.credit import with_shuffled_rewards
from turnwise_grpo_trainer.live_view import TrainView
from turnwise_grpo_trainer.metric_log import MetricLog
from turnwise_grpo_trainer.numbers import episode_numbers, refuse_all_failed
from turnwise_grpo_trainer.setup import Setup
from turnwise_grpo_trainer.task_stream import TaskStream
from turnwise_grpo_trainer.trainers import Trainer


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
        """Train until the last step."""
        train = self.setup.train
        if not self.step:
            self.validate()
        while self.step < train.num_steps:
            stages, started = self.begin_step()
            with stages.timed("rollout"):
                groups = self.collect(self.step + 1)
            self.learn(groups, stages, started)

    def begin_step(self) -> tuple[Stages, float]:
        """Start the clocks of a step."""
        self._cpu_mark = time.process_time()
        return Stages(), time.perf_counter()

    def collect(self, step: int) -> list[EpisodeGroup]:
        """Roll out whole groups for a step, in the order of their tasks; fewer where refills do not help."""
        train = self.setup.train
        order: dict[str, int] = {}
        for _ in range(1 + (train.buffer.max_refills if train.buffer.dynamic_sampling else 0)):
            missing = train.tasks_per_step - len(self.buffer)
            tasks = self.stream.take(missing, without=order) if missing > 0 else []
            if not tasks:
                break
            order |= {task.uid: len(order) + place for place, task in enumerate(tasks)}
            for _number, episode in self.manager.numbered(tasks, global_step=step):
                self.buffer.put(episode)
                self.view.episode(episode)
        groups = self.buffer.take(min(train.tasks_per_step, len(self.buffer)))
        # Groups come in the order in which they ended, which is never the same twice.
        return sorted(groups, key=lambda group: order[group.episodes[0].task.uid])

    def learn(self, groups: Sequence[EpisodeGroup], stages: Stages, started: float) -> None:
        """Do what follows a rollout: update, bring the weights over, log, and what is due."""
        episodes = [episode for group in groups for episode in group.episodes]
        refuse_all_failed(episodes)
        numbers = episode_numbers(episodes)
        numbers["buffer/staleness"] = float(max(map(self.buffer.staleness, groups), default=0))
        if episodes:
            numbers |= self.update(episodes, stages)
            self.version += 1
            with stages.timed("sync"):
                numbers |= self.bring_weights()
        self.buffer.set_version(self.version)
        self.step += 1
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
        last = self.step == train.num_steps
        if last or (train.validation.every and self.step % train.validation.every == 0):
            self.validate()
        if last or (train.checkpoint.every and self.step % train.checkpoint.every == 0):
            self.save()

    def validate(self) -> None:
        """Run the held-out tasks and log how many were solved."""
        tasks = self.setup.validation_tasks[: self.setup.train.validation.limit]
        if not tasks:
            return
        started = time.perf_counter()
        episodes = self.manager.rollout(tasks, global_step=self.step, validation=True)
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

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "step": self.step,
            "version": self.version,
            "train_s": self.train_s,
            "train_cpu_s": self.train_cpu_s,
            "stream": self.stream.state_dict(),
            "validations": [[step, numbers] for step, numbers in self.validations.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called; the engine is given the policy's weights."""
        self.step, self.version = state["step"], state["version"]
        self.train_s, self.train_cpu_s = state["train_s"], state["train_cpu_s"]
        self.stream.load_state_dict(state["stream"])
        self.validations = {int(step): dict(numbers) for step, numbers in state["validations"]}
        self.buffer.set_version(self.version)
        if self.version:
            self.manager.update_weights(self.trainer.weights(), version=self.version)
        structlog.get_logger().info("training goes on", step=self.step, version=self.version)
