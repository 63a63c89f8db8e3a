"""Builds the trainer and the training loop from a setup."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from turnwise import RolloutManager
from turnwise.errors import ConfigError
from turnwise.types import Capabilities
from turnwise_grpo_trainer.learner.devices import select_device
from turnwise_grpo_trainer.loop.async_collector import AsyncCollector
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore
from turnwise_grpo_trainer.loop.group_source import GroupSource
from turnwise_grpo_trainer.loop.interrupts import Interrupt
from turnwise_grpo_trainer.loop.loop import TrainLoop
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_grpo_trainer.loop.weight_sync import DirectSync, HybridSync, WeightSync
from turnwise_grpo_trainer.objective.scorers import Scorer
from turnwise_grpo_trainer.processes.placement import borrows_devices
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, join_group, load_local_trainer
from turnwise_grpo_trainer.processes.trainers import Trainer
from turnwise_grpo_trainer.report.episode_log import EpisodeLog
from turnwise_grpo_trainer.report.live_view import TrainView
from turnwise_grpo_trainer.report.metric_log import MetricLog
from turnwise_grpo_trainer.train_setup import TrainSetup
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream


def build_learner_spec(setup: TrainSetup) -> LearnerSpec:
    """Return the inputs that a process loads its learner from."""
    rollout = setup.run.rollout
    return LearnerSpec(
        setup.train,
        setup.model,
        rollout.sampling.temperature,
        rollout.response_length,
        plugins=setup.host.recipe(),
        code=setup.code,
        seed=rollout.seed,
    )


def build_trainer(setup: TrainSetup, manager: RolloutManager) -> Trainer:
    """Load the models, in this process or in several; these borrow the GPUs of a started manager if they share them."""
    spec, sharding = build_learner_spec(setup), setup.train.sharding
    if sharding.num_processes > 1:
        on_ray, gpus = import_ray_trainer(), []
        if borrows_devices(setup):
            runtime: Any = manager.runtime  # on Ray, see `place_training`; plugins do not import its class
            located = manager.call(runtime.locate_replicas())
            gpus = [on_ray.ReservedGpu(node, gpu) for node, replica_gpus in located for gpu in replica_gpus]
        trainer: Trainer = on_ray.RayTrainer.start(spec, setup.run.runtime.ray.address, gpus)
        return trainer
    if sharding.sharded and not dist.is_initialized():
        join_group(None, rank=0, world_size=1, device=select_device(setup.train.policy))
    return load_local_trainer(spec)


def import_ray_trainer() -> ModuleType:
    """Import the trainer that runs in several processes, and Ray with it."""
    # Ray reads it when it is imported. It would show one of several similar lines, such as those of two episodes.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        from turnwise_grpo_trainer.processes import ray_trainer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"train.sharding.num_processes: more than 1 needs {error.name}: pip install 'turnwise[ray]'"
        ) from error
    return ray_trainer


def build_loop(
    setup: TrainSetup,
    manager: RolloutManager,
    trainer: Trainer,
    log: MetricLog,
    view: TrainView,
    scorers: Sequence[Scorer] = (),
) -> TrainLoop:
    """Build the training loop of the configured modes, before its first step; its parts and `scorers` have started."""
    stop, buffer = Interrupt(), build_buffer(setup)
    decode = manager.chat.tokenizer.decode if manager.chat else None
    return TrainLoop(
        setup=setup,
        manager=manager,
        trainer=trainer,
        source=_build_source(setup, manager, buffer, stop, view),
        sync=_build_sync(setup, manager, trainer),
        store=CheckpointStore(log.out, setup.train.checkpoint.keep_last),
        episodes=EpisodeLog(log.out, setup.train.episodes.every, decode),
        buffer=buffer,
        log=log,
        view=view,
        stop=stop,
        scorers=scorers,
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
    stream = TaskStream(setup.tasks, setup.run.rollout.seed, setup.shares)
    if setup.train.mode == "async":
        return AsyncCollector.create(manager, stream, buffer, setup.train, stop, view.episode)
    return SyncCollector(manager, stream, buffer, setup.train, stop, view.episode)


def _build_sync(setup: TrainSetup, manager: RolloutManager, trainer: Trainer) -> WeightSync:
    adapters = sends_adapters(setup, manager.capabilities) if setup.train.lora else False
    if setup.shares_devices:
        return HybridSync(manager, trainer, setup.run.memory.level, adapters, asleep=borrows_devices(setup))
    return DirectSync(manager, trainer, adapters)


def sends_adapters(setup: TrainSetup, engine: Capabilities) -> bool:
    """Return whether the engine gets adapters alone; `ConfigError` if the config demands it and the engine cannot."""
    sync = setup.train.lora.sync if setup.train.lora else "merged"
    if sync == "adapters" and not engine.adapter_updates:
        name = setup.run.engine.name
        raise ConfigError(f"train.lora.sync: the engine {name!r} does not apply adapters; set it to merged or auto")
    return engine.adapter_updates and (sync == "adapters" or (sync == "auto" and not setup.drops_weights))
