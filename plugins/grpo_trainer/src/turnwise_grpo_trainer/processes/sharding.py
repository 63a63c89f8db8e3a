"""FSDP2: shards a model with torch's `fully_shard`, in one process or several."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # torch re-exports them implicitly

from turnwise.config.models import find_here
from turnwise.config.own_code import OwnCode
from turnwise.protocols import ModelSpec
from turnwise.types import PluginRecipe
from turnwise_engine_support.devices import check_device
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.learner.devices import select_device
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.random_states import seed_torch
from turnwise_grpo_trainer.processes.trainers import LocalTrainer


@frozen
class LearnerSpec:
    """
    All that a process needs to load its learner; it can be pickled.

    Attributes:
        train: the `train` section.
        model: the model to train.
        temperature: sampling temperature of the engine.
        response_length: the longest possible response.
        plugins: of the run; None takes the installed ones.
        code: the user's own code that the run may use.
        seed: of the run; new weights of a critic, and dropout, depend on it.
    """

    train: TrainConfig
    model: ModelSpec
    temperature: float
    response_length: int
    plugins: PluginRecipe | None = None
    code: OwnCode | None = None
    seed: int = 0


def load_local_trainer(spec: LearnerSpec) -> LocalTrainer:
    """Load the models in this process. If the model is to be sharded, the process must have joined its group before."""
    check_device(spec.train.policy.device, "train.policy.device")
    device = select_device(spec.train.policy)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spec.train.sharding.num_threads is not None:
        torch.set_num_threads(spec.train.sharding.num_threads)
    seed_torch(spec.seed)  # the same in all processes: new weights must not depend on their number
    model = find_here(spec.model)  # this process may be on another machine than the driver
    learner = Learner.load(
        spec.train,
        model,
        temperature=spec.temperature,
        response_length=spec.response_length,
        device=device,
        to_device=make_sharder(device) if spec.train.sharding.sharded else None,
        plugins=spec.plugins,
        code=spec.code,
    )
    seed_torch(spec.seed, learner.rank)  # each process draws its own dropout
    trainer = LocalTrainer(learner, Path(model.path or "."))
    trainer.release_unchanged()  # sizes were measured with a forward pass; an engine of this process loads next
    return trainer


def join_group(store: Store | None, *, rank: int, world_size: int, device: torch.device) -> None:
    """
    Join the process group of the training, over NCCL on GPUs and gloo elsewhere.

    Args:
        store: rendezvous of the processes; None if this process is the whole group.
        rank: number of this process.
        world_size: number of processes.
        device: of the model.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store or HashStore(), rank=rank, world_size=world_size)


def make_sharder(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that moves a model to the device and shards each layer, and the rest as one unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def shard(model: Any) -> Any:
        model = model.to(device)
        for layer in find_layers(model):
            fully_shard(layer, mesh=mesh)
        # Tied weights, such as embedding and output head, must be in the same unit, the root's.
        return fully_shard(model, mesh=mesh)

    return shard


def find_layers(model: Any) -> list[Any]:
    """Return the modules that transformers declares unsplittable, in order."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
