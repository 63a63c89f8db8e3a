"""The plan of a training and the devices that it needs, for `turnwise train --dry-run`. Loads and starts nothing."""

from __future__ import annotations

import json
import math
from typing import Final

from attrs import frozen
from rich.table import Table

from turnwise import PoolPlacement, RolloutManager, plan_placement
from turnwise.console import Console
from turnwise.errors import ConfigError
from turnwise.models.hub import weight_bytes
from turnwise_engine_support.devices import check_device_name
from turnwise_grpo_trainer.learner.devices import gpus_per_process
from turnwise_grpo_trainer.train_setup import TrainSetup

_BYTES: Final = {"float32": 4, "bfloat16": 2}
_GIB: Final = 1 << 30


@frozen
class TrainingPlacement:
    """
    Devices of a training.

    Attributes:
        rollout_gpus: GPUs of all replicas.
        trainer_gpus: GPUs of all training processes.
        total_gpus: GPUs of both, which are the same ones if they share devices.
        trainer_gib: weights, gradients and optimizer states of one process, without activations.
    """

    rollout_gpus: float
    trainer_gpus: float
    total_gpus: float
    trainer_gib: float


def describe_plan(setup: TrainSetup) -> list[tuple[str, str]]:
    """
    Return the plan as pairs of a name and a text.

    Raises:
        ConfigError, PluginError: a plugin's options are wrong, or engine and trainer cannot share their devices.
    """
    manager = RolloutManager.from_config(setup.run, setup.host)  # checks the options of every plugin; starts nothing
    if setup.run.runtime.name == "local":  # a runtime of other processes knows its engine once it has started
        setup.check_replays(manager.capabilities)

    train, run, algorithm, commit = setup.train, setup.run, setup.train.algorithm, setup.model.commit
    place = place_training(setup)
    episodes = train.tasks_per_step * setup.group_size
    sharding = "FSDP2" if train.sharding.sharded else "unsharded"
    return [
        ("model", f"{setup.model.name} at {commit[:12]}" if commit else str(setup.model.path)),
        ("engine", f"{run.engine.name}, runtime {run.runtime.name}"),
        ("agent", f"{run.agent.name}, reward {run.reward.name if run.reward else 'none'}"),
        ("tasks", f"{len(setup.tasks)} for training, {len(setup.validation_tasks)} held out"),
        ("a step", f"{train.tasks_per_step} tasks x {setup.group_size} = {episodes} episodes"),
        ("steps", f"{train.num_steps}, {math.ceil(train.num_steps * train.tasks_per_step / len(setup.tasks))} epochs"),
        ("mode", _describe_mode(setup)),
        ("memory", _describe_memory(setup)),
        ("algorithm", f"{algorithm.adv_estimator.name}, loss {algorithm.agg_mode}, lr {train.optimizer.lr:g}"),
        ("trainer", f"{train.sharding.num_processes} process(es), {sharding}, {_describe_trained(setup)}"),
        ("GPUs", f"rollout {place.rollout_gpus:g}, trainer {place.trainer_gpus:g}, together {place.total_gpus:g}"),
        ("trainer memory", f"{place.trainer_gib:.2f} GiB per process, without activations"),
    ]


def place_training(setup: TrainSetup) -> TrainingPlacement:
    """
    Return the devices of a training.

    Raises:
        ConfigError: the trainer's device has no name of torch; or engine and trainer share devices, but have different
            numbers of GPUs, or cannot share these.
    """
    train = setup.train
    check_device_name(train.policy.device, "train.policy.device")  # the plan may be for a machine with other devices
    pools = {pool.name: pool for pool in plan_placement(setup.run).pools if pool.device == "GPU"}
    policy = pools["policy"].total_devices if "policy" in pools else 0.0
    rollout = sum(pool.total_devices for pool in pools.values())
    trainer = gpus_per_process(train) * train.sharding.num_processes
    if setup.shares_devices and trainer and policy and trainer != policy:
        raise ConfigError(
            f"memory.mode: hybrid shares devices, but the engine has {policy:g} GPUs and the trainer {trainer:g}"
        )
    if setup.shares_devices and setup.run.runtime.ray.max_replicas:
        raise ConfigError("memory.mode: hybrid has a fixed number of replicas; remove runtime.ray.max_replicas")
    if borrows_devices(setup):
        _check_sharing(setup, pools.get("policy"))
    total = rollout + trainer - (min(policy, trainer) if setup.shares_devices else 0)
    return TrainingPlacement(rollout, trainer, total, _count_trainer_bytes(setup) / _GIB)


def borrows_devices(setup: TrainSetup) -> bool:
    """
    Return whether training processes run on GPUs that Ray has reserved for replicas.

    Ray can reserve a GPU only once. So the replicas reserve them, and the processes are placed beside the replicas.
    """
    sharding = setup.train.sharding
    return setup.shares_devices and sharding.num_processes > 1 and gpus_per_process(setup.train) > 0


def _check_sharing(setup: TrainSetup, policy: PoolPlacement | None) -> None:
    """Raise `ConfigError` if training processes cannot run on the GPUs of the replicas."""
    problem = "memory.mode: hybrid with several training processes "
    if setup.run.runtime.name != "ray":
        raise ConfigError(problem + "needs runtime.name=ray, which places them on the GPUs of the replicas")
    if policy is None:
        raise ConfigError(problem + "needs replicas on GPUs; set runtime.device=gpu, or memory.mode=standalone")
    if gpus_per_process(setup.train) != 1:
        raise ConfigError(problem + "needs train.sharding.gpus_per_process=1: they share whole GPUs")
    if len(policy.bundles) > 1:
        raise ConfigError(problem + "needs replicas that fit on one node: the engine itself places its larger ones")
    if policy.num_devices < 1:
        raise ConfigError(problem + f"needs replicas of whole GPUs, not of {policy.num_devices:g}")


def _describe_mode(setup: TrainSetup) -> str:
    buffer = setup.train.buffer
    notes = {
        "sync": "rollout and update in turns",
        "async": f"rollout during updates, at most {buffer.max_staleness} versions behind, then {buffer.stale}",
    }
    return f"{setup.train.mode}: {notes[setup.train.mode]}"


def _describe_trained(setup: TrainSetup) -> str:
    lora = setup.train.lora
    return "all weights" if lora is None else f"LoRA of rank {lora.rank} on {', '.join(lora.target_modules)}"


def _describe_memory(setup: TrainSetup) -> str:
    memory = setup.run.memory
    if setup.shares_devices:
        return f"hybrid: engine and trainer share devices; the engine sleeps at level {memory.level} during updates"
    return f"{memory.mode}: engine and trainer have separate devices"


def _count_trainer_bytes(setup: TrainSetup) -> float:
    """
    Return bytes of weights, gradients and AdamW's two moments, and of reference and critic, in one process.

    With LoRA only the weights count, which are the reference, too: adapters are small.
    """
    policy, algorithm, sharding = setup.train.policy, setup.train.algorithm, setup.train.sharding
    size = _count_parameters(setup) * _BYTES[policy.dtype]
    trained = 4.0 + (1 if algorithm.kl_loss_coef > 0 else 0) if setup.train.lora is None else 1.0
    models = trained + (4 if algorithm.adv_estimator.name == "gae" else 0)
    return size * models / (sharding.num_processes if sharding.sharded else 1)


def _count_parameters(setup: TrainSetup) -> float:
    """Return the number of parameters, from the sizes of the weight files and the data type in the config."""
    path = setup.model.path
    if path is None or not (path / "config.json").is_file():
        return 0.0
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    index = path / "model.safetensors.index.json"
    width = 2 if "16" in str(config.get("dtype", config.get("torch_dtype", ""))) else 4
    if index.is_file():
        return float(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]) / width
    files = list(path.glob("*.safetensors"))
    source = setup.run.model_source() if setup.model.commit and not files else None
    on_hub = weight_bytes(source) if source is not None else None  # before the weights are downloaded
    return (on_hub or sum(file.stat().st_size for file in files)) / width


def print_plan(setup: TrainSetup) -> None:
    """Print the plan."""
    table = Table(title="plan", show_header=False)
    for name, text in describe_plan(setup):
        table.add_row(name, text)
    Console().print(table)
