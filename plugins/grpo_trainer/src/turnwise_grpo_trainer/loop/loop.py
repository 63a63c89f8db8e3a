"""
The training loop: roll out, train, update the engine's weights, repeat.

The loop does a step's bookkeeping, validation and checkpoints. Three parts differ between modes and are passed in:
where groups come from (`GroupSource`), how the engine gets new weights (`WeightSync`), and where checkpoints go
(`CheckpointStore`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog
from attrs import define, field

from turnwise import EpisodeResult, RolloutManager
from turnwise_engine_support.freed_memory import return_freed_memory
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore, TrainingState
from turnwise_grpo_trainer.loop.group_source import GroupSource
from turnwise_grpo_trainer.loop.health import TrainingHealth
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_grpo_trainer.loop.weight_sync import WeightSync
from turnwise_grpo_trainer.objective.hooks import GROUP_ADVANTAGES
from turnwise_grpo_trainer.objective.reward_shaping import punish_overlong, shuffle_rewards
from turnwise_grpo_trainer.objective.scorers import Scorer, score_episodes
from turnwise_grpo_trainer.processes.trainers import Trainer
from turnwise_grpo_trainer.report.episode_log import EpisodeLog, split_advantages
from turnwise_grpo_trainer.report.episode_metrics import check_not_all_failed, compute_episode_metrics, task_rewards
from turnwise_grpo_trainer.report.held_out import check_score_name, count_since_best, find_best_step
from turnwise_grpo_trainer.report.live_view import TrainView
from turnwise_grpo_trainer.report.metric_log import MetricLog
from turnwise_grpo_trainer.report.pass_at_k import bootstrap
from turnwise_grpo_trainer.report.stage_meter import StageMeter
from turnwise_grpo_trainer.train_setup import TrainSetup
from turnwise_rollout_buffer import EpisodeGroup, TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import hash_tasks


@define(eq=False, kw_only=True)
class TrainLoop:
    """
    A training in progress.

    Attributes:
        setup: the inputs of the training.
        manager: started.
        trainer: holds the policy.
        source: supplies groups.
        sync: updates the engine's weights.
        store: keeps checkpoints.
        episodes: writes the episodes of the steps.
        buffer: the buffer between rollout and trainer, shared with the source.
        log: started.
        view: shows the progress.
        stop: the request to stop, shared with the source.
        scorers: started; they fill columns of the episodes of a step.
        step: number of completed steps.
        version: weight version of policy and engine.
        train_s: seconds spent in steps.
        train_cpu_s: processor seconds of this process spent in steps; on a busy machine this is the better measure.
        validations: metrics of each validation, by step.
        health: follows the metrics and warns.
    """

    setup: TrainSetup
    manager: RolloutManager
    trainer: Trainer
    source: GroupSource
    sync: WeightSync
    store: CheckpointStore
    episodes: EpisodeLog
    buffer: TrajectoryBuffer
    log: MetricLog
    view: TrainView
    stop: Interrupt
    scorers: Sequence[Scorer] = ()
    step: int = 0
    version: int = 0
    train_s: float = 0.0
    train_cpu_s: float = 0.0
    validations: dict[int, dict[str, float]] = field(factory=dict)
    health: TrainingHealth = field(init=False)
    _saved_step: int = field(default=0, init=False)
    _waiting_metrics: dict[str, float] = field(factory=dict, init=False)
    _is_collecting: bool = field(default=False, init=False)
    _is_updating: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        by_reward = not self.scorers  # otherwise the loss may learn from their columns, whatever the rewards are
        by_groups = by_reward and self.setup.train.algorithm.adv_estimator.name in GROUP_ADVANTAGES
        watch_reward = by_reward and not self.setup.train.buffer.dynamic_sampling
        self.health = TrainingHealth(watch_reward=watch_reward, by_groups=by_groups)

    def run(self) -> None:
        """
        Train to the last step. After any error there is a checkpoint of the last whole update.

        Raises:
            TrainingInterruptedError: `interrupt` was called; a checkpoint was written.
        """
        try:
            self.sync.start()
            if self._validation_is_due() and self._validate_and_compare():
                self.save()
            with self.source.running():
                while not self.finished:
                    self._run_step()
                    self.source.notify()
            self.sync.finish()
        except TrainingInterruptedError:
            self.save()
            raise TrainingInterruptedError(f"interrupted after step {self.step}") from None
        except Exception:
            self._save_after_error()
            raise

    def interrupt(self) -> None:
        """Stop soon: running episodes are interrupted, an update is completed. Safe to call from a signal handler."""
        # The flags come before the abort: episodes that it ends must be recognised as interrupted.
        self.source.interrupt_soon()
        self.stop.requested = True
        self.manager.abort()

    # A step

    def _run_step(self) -> None:
        meter = StageMeter()
        self._is_collecting = True
        with meter.stage(self.source.stage):
            groups = self.source.collect(self.step + 1)
        metrics = self._train_on(groups, meter)
        self.train_s += meter.wall_s
        self.train_cpu_s += meter.cpu_s
        self._report(metrics, meter)
        is_best = self._validation_is_due() and self._validate_and_compare()
        if is_best or self._checkpoint_is_due():
            self.save()
        self.stop.check()

    def _train_on(self, groups: Sequence[EpisodeGroup], meter: StageMeter) -> dict[str, float]:
        """Update the policy and then the engine's weights; return metrics. Without groups, no weight changes."""
        episodes = [episode for group in groups for episode in group.episodes]
        check_not_all_failed(episodes)
        metrics = compute_episode_metrics(episodes) if episodes else {"tokens/action": 0.0}
        metrics["buffer/staleness"] = float(max(map(self.buffer.staleness, groups), default=0))
        if episodes:
            switched = self.sync.before_update()
            if self.scorers:
                with meter.stage("score"), self.manager.waiting_for("the scorers"):
                    episodes = score_episodes(self.scorers, episodes)
            self._is_updating = True
            metrics |= self._update_policy(episodes, meter) | switched
            self.version += 1
        # The models have changed, so the step counts although the engine may refuse its weights.
        self.step += 1
        self._is_collecting = self._is_updating = False
        if episodes:
            with meter.stage("sync"):
                metrics |= self.sync.update_weights(self.version)
                return_freed_memory()  # an engine in this process has freed a whole copy of the weights
        self.buffer.set_version(self.version)
        if not metrics.get("actor/trained_tokens"):
            dropped = {name: count for name, count in self.buffer.counts.items() if name.startswith("dropped")}
            structlog.get_logger().warning(
                "step without any token to train on", step=self.step, episodes=len(episodes), **dropped
            )
        return metrics

    def _update_policy(self, episodes: Sequence[EpisodeResult], meter: StageMeter) -> dict[str, float]:
        with meter.stage("collate"):
            batch = self.manager.collate(list(episodes))
            shaping: dict[str, float] = {}
            if (overlong := self.setup.train.algorithm.overlong) is not None:
                batch, shaping = punish_overlong(batch, overlong, self.setup.run.rollout.response_length)
            if self.setup.train.shuffle_rewards:
                batch = shuffle_rewards(batch, seed=self.step + 1)
        with meter.stage("update"), self.manager.waiting_for("the update of the policy"):
            factor = self.health.expected_cosine if self.setup.train.optimizer.noise_adaptive else 1.0
            metrics = shaping | self.trainer.update(batch, step=self.step + 1, version=self.version, lr_factor=factor)
        if self.episodes.is_due(self.step + 1):
            with meter.stage("episodes"):
                advantages = split_advantages(episodes, self.trainer.advantages(), self.manager.collate)
                self.episodes.write(self.step + 1, episodes, advantages)
        return metrics

    def _report(self, metrics: dict[str, float], meter: StageMeter) -> None:
        step_s = meter.wall_s
        metrics |= self._waiting_metrics | meter.metrics()
        self._waiting_metrics = {}
        metrics |= {f"buffer/{name}": float(count) for name, count in self.buffer.counts.items()}
        spent = meter.seconds("rollout") + metrics.get("seconds/forward_backward", 0.0)
        metrics |= {
            "seconds/step": step_s,
            "seconds/overhead_share": max(0.0, step_s - spent - metrics.get("seconds/log_probs", 0.0)) / step_s,
            "seconds/train": self.train_s,
            "seconds/train_cpu": self.train_cpu_s,
            "tokens/per_s": metrics["tokens/action"] / step_s,
            "version": float(self.version),
        }
        warnings = self.health.observe(self.step, metrics)
        self.log.write(self.step, metrics)
        self.view.step(self.step, metrics)
        for text in warnings:
            self.view.warning(text)

    # Validation and checkpoints

    def _validation_is_due(self) -> bool:
        train, every = self.setup.train, self.setup.train.validation.every
        due = self.step in (0, train.num_steps) or (every and self.step % every == 0)
        return bool(due) and self.step not in self.validations

    def _checkpoint_is_due(self) -> bool:
        every = self.setup.train.checkpoint.every
        return self.finished or (every > 0 and self.step % every == 0)

    def _validate_and_compare(self) -> bool:
        """Validate; return whether a checkpoint is due because the held-out score is the best so far."""
        self.validate()
        checkpoint = self.setup.train.checkpoint
        # The initial model is on disk already, unless a checkpoint of it may have to become `model/`.
        wanted = checkpoint.keep_best and (self.step > 0 or checkpoint.export == "best")
        return wanted and self.best_step == self.step

    @property
    def best_step(self) -> int | None:
        """Step with the best held-out score; None without a score."""
        return find_best_step(self.validations, self.setup.train.validation.score)

    @property
    def kept_step(self) -> int | None:
        """See `Checkpointable`: the best step, with `keep_best`."""
        return self.best_step if self.setup.train.checkpoint.keep_best else None

    @property
    def stopped_early(self) -> bool:
        """Whether the held-out score has not improved for `patience` validations."""
        options = self.setup.train.validation
        return options.patience is not None and count_since_best(self.validations, options.score) >= options.patience

    @property
    def finished(self) -> bool:
        """Whether no step is left to be made."""
        return self.step >= self.setup.train.num_steps or self.stopped_early

    def validate(self) -> None:
        """Roll out the held-out tasks and log their metrics; do nothing without such tasks."""
        tasks = self.setup.validation_tasks[: self.setup.train.validation.limit]
        if not tasks:
            return
        meter = StageMeter()
        with meter.stage("validation"):
            episodes = self.manager.rollout(tasks, global_step=self.step, validation=True)
        self.stop.check()
        check_not_all_failed(episodes)
        metrics = {f"validation/{name}": value for name, value in compute_episode_metrics(episodes).items()}
        metrics |= _reward_interval(episodes)
        metrics |= {f"validation/{name.partition('/')[0]}": cost for name, cost in meter.metrics().items()}
        check_score_name(metrics, self.setup.train.validation.score)
        self.validations[self.step] = metrics
        self.episodes.write_validation(self.step, episodes)
        self.log.write(self.step, metrics)
        self.view.validation(self.step, metrics)

    def save(self) -> None:
        """Write a checkpoint; running episodes are interrupted for it, and resume afterwards."""
        meter = StageMeter()
        with self.source.paused(), self.view.activity("checkpoint"), meter.stage("checkpoint"):
            self.store.save(self)
        self._saved_step = self.step
        self._waiting_metrics = meter.metrics()

    def log_end(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics that follow the last step, with the costs of the last checkpoint."""
        self.log.write(self.step, self._waiting_metrics | dict(metrics))

    def _save_after_error(self) -> None:
        """Save the steps since the last checkpoint; an update that was cut off leaves no state to save."""
        if self._is_updating or self.step == self._saved_step:
            return
        if self._is_collecting:
            self.source.undo_collect()
        self.buffer.set_version(self.version)
        log = structlog.get_logger()
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - the first error is the one to report
            log.warning("no checkpoint after the error", step=self.step, error=f"{type(error).__name__}: {error}")
        else:
            log.warning("checkpoint after an error; --resume continues from it", step=self.step)

    def save_models(self, folder: Path) -> None:
        """Write the models; see `Checkpointable`."""
        self.trainer.save(folder)

    def load_models(self, folder: Path) -> None:
        """Restore the models; see `Checkpointable`."""
        self.trainer.load(folder)

    def state_dict(self) -> TrainingState:
        """Return the state besides the models."""
        buffer = self.buffer.state_dict()
        waiting, partial = buffer.pop("waiting"), buffer.pop("partial")
        progress = {
            "step": self.step,
            "version": self.version,
            "train_s": self.train_s,
            "train_cpu_s": self.train_cpu_s,
            "validations": [[step, metrics] for step, metrics in self.validations.items()],
            "health": self.health.state_dict(),
            "held_out": hash_tasks(self.setup.validation_tasks),
            "source": self.source.state_dict(),
            "buffer": buffer,
        }
        return TrainingState(progress=progress, waiting=waiting, partial=partial, unfinished=self.source.unfinished)

    def load_state_dict(self, state: TrainingState) -> None:
        """Restore the state, possibly from another mode, and update the engine to the policy's weights."""
        progress, partial, unfinished = state.progress, state.partial, state.unfinished
        if self.manager.groups is not None:
            partial, unfinished = self.manager.groups.reopen(partial, unfinished)
        self.buffer.load_state_dict({**progress["buffer"], "waiting": state.waiting, "partial": partial})
        self.step, self.version = progress["step"], progress["version"]
        self._saved_step = self.step
        self.train_s, self.train_cpu_s = progress["train_s"], progress["train_cpu_s"]
        self.validations = {int(step): dict(metrics) for step, metrics in progress["validations"]}
        self.health.load_state_dict(progress["health"])
        if progress.get("held_out", now := hash_tasks(self.setup.validation_tasks)) != now:
            text = "the held-out tasks have changed: scores before and after the resume do not compare"
            structlog.get_logger().warning(text, step=self.step)
        self.source.load_state_dict(progress["source"], step=self.step)
        self.source.load_partial(unfinished)
        self.buffer.set_version(self.version)
        if self.version:
            self.sync.update_weights(self.version)
        structlog.get_logger().info("training resumed", step=self.step, version=self.version)


def _reward_interval(episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    """Return the 95 % interval of the mean held-out reward over tasks; nothing with fewer than two scored tasks."""
    means = [sum(rewards) / len(rewards) for rewards in task_rewards(episodes)]
    interval = bootstrap(means) if means else None
    if interval is None or interval.low is None or interval.high is None:
        return {}
    return {"validation/reward/low": interval.low, "validation/reward/high": interval.high}
