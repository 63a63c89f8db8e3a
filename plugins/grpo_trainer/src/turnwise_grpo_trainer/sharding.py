"""FSDP2: torch's `fully_shard`, for one process or several."""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen

from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.learner import Learner
from turnwise_grpo_trainer.models import device_of
from turnwise_grpo_trainer.trainers import LocalTrainer

if TYPE_CHECKING:
    from turnwise_grpo_trainer.setup import Setup


@frozen
class LearnerSpec:
    """
    All that a process needs to make its learner; plain enough to travel.

    Attributes:
        train: the `train` section.
        spec: the model.
        temperature: that the engine samples with.
        response_length: the longest response.
    """

    train: TrainConfig
    spec: ModelSpec
    temperature: float
    response_length: int

    @classmethod
    def of(cls, setup: Setup) -> LearnerSpec:
        """Take it from a setup."""
        rollout = setup.run.rollout
        return cls(setup.train, setup.spec, rollout.sampling.temperature, rollout.response_length)

    def trainer(self) -> LocalTrainer:
        """Load the models in this process, as one of the group when there is one."""
        device = device_of(self.train.policy)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.train.sharding.num_threads is not None:
            torch.set_num_threads(self.train.sharding.num_threads)
        place = placed(device) if self.train.sharding.sharded else None
        learner = Learner.load(
            self.train,
            self.spec,
            temperature=self.temperature,
            response_length=self.response_length,
            device=device,
            place=place,
        )
        return LocalTrainer(learner, Path(self.spec.path or "."))


def local_trainer(setup: Setup) -> LocalTrainer:
    """Load the models in this process; sharded among one when that is asked for."""
    spec = LearnerSpec.of(setup)
    if setup.train.sharding.sharded and not dist.is_initialized():
        store = Path(tempfile.mkdtemp(prefix="turnwise-")) / "store"
        join_group(f"file://{store}", rank=0, world_size=1, device=device_of(setup.train.policy))
    return spec.trainer()


def gpus_each(train: TrainConfig) -> float:
    """Return how many GPUs Ray reserves for each process: those of the config, or 1 where it trains on one."""
    gpus = train.sharding.gpus_per_process
    return gpus if gpus is not None else float(device_of(train.policy).type == "cuda")


def join_group(address: str, *, rank: int, world_size: int, device: torch.device) -> None:
    """Join the processes that train together, over NCCL on GPUs and gloo elsewhere."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)


def placed(device: torch.device) -> Callable[[Any], Any]:
    """Return what shards a model: every layer by itself, and the rest with the root, where tied weights meet."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def place(model: Any) -> Any:
        model = model.to(device)
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return place


def layers_of(model: Any) -> list[Any]:
    """Return the blocks that transformers says must not be split, in order."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
