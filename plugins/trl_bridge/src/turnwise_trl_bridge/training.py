"""Trains with TRL's trainers, configured from a run's config, for `turnwise trl`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from turnwise import Task
from turnwise.errors import ConfigError
from turnwise.files import share_weights
from turnwise.models.loaded_weights import refuse_missing
from turnwise_engine_support.picture_families import check_grids, supports_grids
from turnwise_result_files.messages import shows_picture
from turnwise_trl_bridge.picture_inputs import copy_processor
from turnwise_trl_bridge.rollouts import Rollouts, build_dataset


def _load(kind: Any, path: str, **options: object) -> Any:
    """Load a model; `ConfigError` if its folder lacks weights."""
    model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    refuse_missing(f"model.path: {path!r}", info["missing_keys"])
    return model


def train_sync(config: Any, tasks: Sequence[Task], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with GRPOTrainer, save the model and return the trainer's log."""
    from trl import GRPOConfig

    from turnwise_trl_bridge.grpo import TurnwiseGRPOTrainer

    path = str(config.model_spec(weights=True).path)
    check_grids(Path(path), "turnwise trl")
    kind: Any = AutoModelForImageTextToText if supports_grids(Path(path)) else AutoModelForCausalLM
    policy = _load(kind, path, dtype=torch.float32)
    rollouts = Rollouts.from_config(config, tasks)
    args = GRPOConfig(
        **_common_args(config, arguments),
        per_device_train_batch_size=arguments.prompts * config.rollout.n,
        num_generations=config.rollout.n,
        beta=0.0,
    )
    with rollouts.manager:
        trainer = TurnwiseGRPOTrainer(
            policy,
            rollouts=rollouts,
            args=args,
            processing_class=AutoTokenizer.from_pretrained(path),
        )
        trainer.train()
    log = save(trainer, arguments)
    if supports_grids(Path(path)):
        copy_processor(Path(path), arguments.out)
    return log


def train_async(config: Any, tasks: Sequence[Task], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with AsyncGRPOTrainer, save the model and return the trainer's log."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from turnwise_trl_bridge.tree_attention import allow_cpu, use_sdpa_tree_attention
    from turnwise_trl_bridge.worker import EngineWeights, RolloutWorker

    for task in tasks:
        if any(map(shows_picture, task.messages)):
            row = f"row {task.sample_index} (task {task.uid!r})"
            raise ConfigError(f"{row} has pictures, which TRL's AsyncGRPOTrainer has no place for: leave --async out")
    path = str(config.model_spec(weights=True).path)
    _load(AutoModelForCausalLM, path, device_map="meta")  # TRL's trainer loads it, and accepts missing weights
    rollouts = Rollouts.from_config(config, tasks)
    rollout = config.rollout
    args = AsyncGRPOConfig(
        **_common_args(config, arguments),
        per_device_train_batch_size=arguments.prompts * rollout.n,
        num_generations=rollout.n,
        token_budget=4 * (rollout.prompt_length + rollout.response_length),
    )
    with rollouts.manager:
        worker = RolloutWorker(rollouts.manager, tasks, num_generations=rollout.n, groups_in_flight=arguments.prompts)
        allow_cpu()
        trainer = AsyncGRPOTrainer(
            path,
            args=args,
            train_dataset=build_dataset(tasks),
            processing_class=AutoTokenizer.from_pretrained(path),
            rollout_worker=worker,
            weight_transfer=EngineWeights(rollouts.manager),
        )
        if not torch.cuda.is_available():
            use_sdpa_tree_attention()
        try:
            trainer.train()
        finally:
            worker.stop()
    log = save(trainer, arguments)
    for entry in log:
        if "rollout/reward" in entry:
            entry["reward"] = entry["rollout/reward"]
    return log


def _common_args(config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the training arguments of both trainers."""
    return {
        "output_dir": str(arguments.out),
        "max_steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "temperature": config.rollout.sampling.temperature,
        "max_completion_length": config.rollout.response_length,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "seed": arguments.seed,
    }


def save(trainer: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Save the model and return the trainer's log."""
    trainer.save_model(str(arguments.out))
    share_weights(arguments.out)
    return list(trainer.state.log_history)
