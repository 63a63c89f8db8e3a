"""
The interface between training loop and trainer, and its implementation in this process.

A trainer is also one side of the memory switch (`turnwise.memory`): it can move its memory off the device and back.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import define
from numpy.typing import NDArray
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.protocols.weights import WeightSource
from turnwise.weights.sources import source_of
from turnwise_engine_support.freed_memory import release_file_pages, return_freed_memory
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.lora import BaseModel
from turnwise_grpo_trainer.learner.model_files import write_model
from turnwise_grpo_trainer.learner.model_state import load_state, save_state
from turnwise_grpo_trainer.learner.optimization import TrainableModel
from turnwise_grpo_trainer.processes.policy_weights import PolicyWeights


class Trainer(Protocol):
    """Trains the policy, in this process or in several."""

    def update(self, batch: RolloutBatch, *, step: int, version: int, lr_factor: float = 1.0) -> dict[str, float]:
        """Train on a batch and return metrics; see `Learner.update`."""

    def advantages(self) -> NDArray[Any]:
        """Return (B, R) the advantages of the last batch; `RuntimeError` before the first update."""

    def weights(self, *, adapters: bool = False) -> WeightSource:
        """
        Return the policy's weights under the names of the Hugging Face state dict, or only its `adapters`.

        They have the values that they have when they are read, on the trainer's device if it is in this process.
        """

    def save(self, folder: Path) -> None:
        """Write models, optimizers, schedules and random number generators."""

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""

    def export(self, folder: Path) -> None:
        """Write the policy and its tokenizer in the format of `from_pretrained`, with adapters merged."""

    def offload_optimizer(self) -> None:
        """Move optimizer states off the device and free the gradients."""

    def offload_parameters(self) -> None:
        """Move the weights off the device."""

    def onload(self) -> None:
        """Move weights and optimizer states back to the device."""

    def memory_bytes(self) -> int:
        """Return how many bytes weights and optimizer states take on the device."""

    def close(self) -> None:
        """Release all resources."""


@define(eq=False)
class LocalTrainer:
    """
    A trainer in this process, or one process of a sharded trainer.

    Attributes:
        learner: holds the models.
        source: directory of the initial model; exports copy its tokenizer.
    """

    learner: Learner
    source: Path

    def update(self, batch: RolloutBatch, *, step: int, version: int, lr_factor: float = 1.0) -> dict[str, float]:
        metrics = self.learner.update(batch, step=step, version=version, lr_factor=lr_factor)
        return_freed_memory()  # otherwise the activations of the update stay resident during the next rollout
        return metrics

    def advantages(self) -> NDArray[Any]:
        if self.learner.advantages is None:
            raise RuntimeError("no batch was trained on yet")
        return self.learner.advantages.numpy()

    def weights(self, *, adapters: bool = False) -> WeightSource:
        policy = self.learner.policy
        if adapters:  # they are small, and their data type depends on their values
            return source_of(policy.adapter_weights())
        return PolicyWeights(policy.weight_specs(), policy.full_weights)

    def save(self, folder: Path) -> None:
        save_state(self.learner, folder)

    def load(self, folder: Path) -> None:
        load_state(self.learner, folder)

    def export(self, folder: Path) -> None:
        export(self.learner.policy, self.source, folder, write=self.learner.rank == 0)

    def offload_optimizer(self) -> None:
        for trainable in self._trainables():
            trainable.optimizer.zero_grad()
            _move_states(trainable, torch.device("cpu"))
        return_freed_memory()

    def offload_parameters(self) -> None:
        for model in self._models():
            model.to("cpu")
        self.release_unchanged()  # on a CPU nothing has moved
        return_freed_memory()

    def release_unchanged(self) -> None:
        """Take weights out of host memory that no update has changed, and that the model's file has."""
        release_file_pages(_local_shard(each) for model in self._models() for each in model.parameters())

    def onload(self) -> None:
        for model in self._models():
            model.to(self.learner.device)
        for trainable in self._trainables():
            _move_states(trainable, self.learner.device)

    def memory_bytes(self) -> int:
        tensors = [parameter for model in self._models() for parameter in model.parameters()]
        tensors += [value for trainable in self._trainables() for value in _states(trainable)]
        device_type = self.learner.device.type
        return sum(_local_shard(tensor).nbytes for tensor in tensors if tensor.device.type == device_type)

    def close(self) -> None:
        """Do nothing: Python frees the models."""

    def _trainables(self) -> list[TrainableModel]:
        return [each for each in (self.learner.policy, self.learner.critic) if each is not None]

    def _models(self) -> list[Any]:
        reference = self.learner.reference
        own = reference is not None and not isinstance(reference, BaseModel)
        return [*(each.model for each in self._trainables()), *([reference] if own else [])]


def _local_shard(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _states(trainable: TrainableModel) -> Iterator[Tensor]:
    # AdamW keeps its step count, a tensor without axes, on the host.
    for state in trainable.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _move_states(trainable: TrainableModel, device: torch.device) -> None:
    for state in trainable.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(device)


def export(trainable: TrainableModel, source: Path, folder: Path, *, write: bool = True) -> None:
    """
    Write the policy as safetensors, adapters merged, with the config and the tokenizer of the initial model.

    Gathering the weights is collective: every process calls it, and one of them with `write`.
    """
    weights = {name: tensor.cpu() for name, tensor in trainable.full_weights()}
    if not write:
        return
    write_model(trainable.model, weights, source, folder)
