"""What a training will be, and where: what `turnwise train --dry-run` prints. Nothing is loaded or started."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from turnwise import placement_of as placement_of_run
from turnwise.errors import ConfigError
from turnwise_grpo_trainer.setup import Setup

_BYTES: Final = {"float32": 4, "bfloat16": 2}
_GIB: Final = 1 << 30


@frozen
class Placement:
    """
    Devices that a training takes.

    Attributes:
        rollout_gpus: of all replicas.
        trainer_gpus: of all processes.
        total_gpus: together; in mode hybrid they are the same ones.
        trainer_gib: weights, gradients and optimizer states of one process, activations not counted.
    """

    rollout_gpus: float
    trainer_gpus: float
    total_gpus: float
    trainer_gib: float


def plan_of(setup: Setup) -> list[tuple[str, str]]:
    """
    Return the plan as pairs of a name and a text.

    Raises:
        ConfigError, PluginError: a part's options are wrong, or the devices do not fit the mode.
    """
    setup.manager()  # checks every plugin's options; starts nothing

    train, run = setup.train, setup.run
    place = placement_of(setup)
    algorithm = train.algorithm
    episodes = train.tasks_per_step * setup.group_size
    return [
        ("model", str(setup.spec.path)),
        ("engine", f"{run.engine.name}, runtime {run.runtime.name}"),
        ("agent", f"{run.agent.name}, reward {run.reward.name}"),
        ("tasks", f"{len(setup.tasks)} to train on, {len(setup.validation_tasks)} held out"),
        ("a step", f"{train.tasks_per_step} tasks x {setup.group_size} = {episodes} episodes"),
        ("steps", f"{train.num_steps}, {math.ceil(train.num_steps * train.tasks_per_step / len(setup.tasks))} passes"),
        ("mode", _mode(setup)),
        ("algorithm", f"{algorithm.adv_estimator}, loss {algorithm.agg_mode}, lr {train.optimizer.lr:g}"),
        (
            "trainer",
            f"{train.sharding.num_processes} process(es), {'FSDP2' if train.sharding.sharded else 'unsharded'}",
        ),
        ("GPUs", f"rollout {place.rollout_gpus:g}, trainer {place.trainer_gpus:g}, together {place.total_gpus:g}"),
        ("trainer memory", f"{place.trainer_gib:.2f} GiB a process, activations not counted"),
    ]


def placement_of(setup: Setup) -> Placement:
    """
    Return what devices are asked for.

    Raises:
        ConfigError: mode hybrid, with engine and trainer on different numbers of GPUs.
    """
    from turnwise_grpo_trainer.sharding import gpus_each  # loads torch

    train, run = setup.train, setup.run
    rollout = _rollout_gpus(run)
    trainer = gpus_each(train) * train.sharding.num_processes
    if train.mode == "hybrid" and trainer and rollout and trainer != rollout:
        raise ConfigError(
            f"train.mode: hybrid shares devices, but the engine has {rollout:g} GPUs and the trainer {trainer:g}"
        )
    total = max(rollout, trainer) if train.mode == "hybrid" else rollout + trainer
    return Placement(rollout, trainer, total, _trainer_bytes(setup) / _GIB)


def _mode(setup: Setup) -> str:
    buffer = setup.train.buffer
    notes = {
        "sync": "one after the other",
        "hybrid": "one after the other, on the same devices",
        "async": f"at once, at most {buffer.max_staleness} versions behind, then {buffer.stale}",
    }
    return f"{setup.train.mode}: {notes[setup.train.mode]}"


def _rollout_gpus(run: Any) -> float:
    return float(sum(pool.total_devices for pool in placement_of_run(run).pools if pool.device == "GPU"))


def _trainer_bytes(setup: Setup) -> float:
    """Weights, gradients and AdamW's two moments, and the models beside the policy, shared among the processes."""
    policy, algorithm, sharding = setup.train.policy, setup.train.algorithm, setup.train.sharding
    size = _num_parameters(setup.spec.path) * _BYTES[policy.dtype]
    models = 4.0 + (1 if algorithm.kl_loss_coef > 0 else 0) + (4 if algorithm.adv_estimator == "gae" else 0)
    return size * models / (sharding.num_processes if sharding.sharded else 1)


def _num_parameters(path: Path | None) -> float:
    """Return the number of weights, from the checkpoint's headers, or from the sizes in its config."""
    if path is None or not (path / "config.json").is_file():
        return 0.0
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    index = path / "model.safetensors.index.json"
    width = 2 if "16" in str(config.get("dtype", config.get("torch_dtype", ""))) else 4
    if index.is_file():
        return float(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]) / width
    files = list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / width


def print_plan(setup: Setup) -> None:
    """Print the plan."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="plan", show_header=False)
    for name, text in plan_of(setup):
        table.add_row(name, text)
    Console().print(table)
