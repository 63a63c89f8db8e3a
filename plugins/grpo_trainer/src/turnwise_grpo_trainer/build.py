"""Builds the trainer and the training loop from a setup."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch.distributed as dist

from turnwise import RolloutManager
from turnwise.errors import ConfigError
from turnwise_grpo_trainer.async_collector import AsyncCollector
from turnwise_grpo_trainer.checkpoints import CheckpointStore
from turnwise_grpo_trainer.group_source import GroupSource
from turnwise_grpo_trainer.interrupts import Interrupt
from turnwise_grpo_trainer.live_view import TrainView
from turnwise_grpo_trainer.loop import TrainLoop
from turnwise_grpo_trainer.metric_log import MetricLog
from turnwise_grpo_trainer.models import select_device
from turnwise_grpo_trainer.sharding import LearnerSpec, join_group, load_local_trainer
from turnwise_grpo_trainer.sync_collector import SyncCollector
from turnwise_grpo_trainer.train_setup import TrainSetup
from turnwise_grpo_trainer.trainers import Trainer
from turnwise_grpo_trainer.weight_sync import DirectSync, HybridSync, WeightSync
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream


def build_learner_spec(setup: TrainSetup) -> LearnerSpec:
    """Return the inputs that a process loads its learner from."""
    rollout = setup.run.rollout
    return LearnerSpec(setup.train, setup.model, rollout.sampling.temperature, rollout.response_length)


def build_trainer(setup: TrainSetup) -> Trainer:
    """Load the models, in this process or in several."""
    spec, sharding = build_learner_spec(setup), setup.train.sharding
    if sharding.num_processes > 1:
        try:
            from turnwise_grpo_trainer.ray_trainer import RayTrainer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"train.sharding.num_processes: more than 1 needs {error.name}: pip install 'turnwise[ray]'"
            ) from error
        return RayTrainer.start(spec, setup.run.runtime.ray.address)
    if sharding.sharded and not dist.is_initialized():
        join_group(None, rank=0, world_size=1, device=select_device(setup.train.policy))
    return load_local_trainer(spec)


def build_loop(
    setup: TrainSetup, manager: RolloutManager, trainer: Trainer, log: MetricLog, view: TrainView
) -> TrainLoop:
    """Build the training loop of the configured modes, before its first step."""
    stop, buffer = Interrupt(), build_buffer(setup)
    return TrainLoop(
        setup=setup,
        manager=manager,
        trainer=trainer,
        source=_build_source(setup, manager, buffer, stop, view),
        sync=_build_sync(setup, manager, trainer),
        store=CheckpointStore(log.out, setup.train.checkpoint.keep_last),
        buffer=buffer,
        log=log,
        view=view,
        stop=stop,
    )


def build_buffer(setup: TrainSetup) -> TrajectoryBuffer:
    """Build the buffer between rollout and trainer."""
    train = setup.train
    return TrajectoryBuffer(
        group_size=setup.group_size,
        max_groups=train.buffer.max_groups or 2 * train.tasks_per_step,
        max_staleness=train.buffer.max_staleness,
        stale=train.buffer.stale,
        dynamic_sampling=train.buffer.dynamic_sampling,
    )


def _build_source(
    setup: TrainSetup, manager: RolloutManager, buffer: TrajectoryBuffer, stop: Interrupt, view: TrainView
) -> GroupSource:
    stream = TaskStream(setup.tasks, setup.run.rollout.seed)
    if setup.train.mode == "async":
        return AsyncCollector.create(manager, stream, buffer, setup.train, stop, view.episode)
    return SyncCollector(manager, stream, buffer, setup.train, stop, view.episode)


def _build_sync(setup: TrainSetup, manager: RolloutManager, trainer: Trainer) -> WeightSync:
    if setup.shares_devices:
        return HybridSync(manager, trainer, setup.run.memory.level)
    return DirectSync(manager, trainer)
