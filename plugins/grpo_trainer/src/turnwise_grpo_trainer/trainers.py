"""
The driver's side of the trainer: one interface, whether the model is trained in this process or in several.

It is also the trainer's half of the memory switch: what can be taken off the device, and brought back.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from attrs import define
from numpy.typing import NDArray
from torch import Tensor

from turnwise import RolloutBatch
from turnwise_grpo_trainer.learner import Learner
from turnwise_grpo_trainer.optimization import Trained


class Trainer(Protocol):
    """What the loop needs of a trainer."""

    def update(self, batch: RolloutBatch, *, step: int, version: int) -> dict[str, float]:
        """Learn from a batch and return numbers for the logs; see `Learner.update`."""

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the policy's weights under the names of the Hugging Face state dict."""

    def save(self, folder: Path) -> None:
        """Write models, optimizers, schedules and random numbers."""

    def load(self, folder: Path) -> None:
        """Stand where `save` was called."""

    def export(self, folder: Path) -> None:
        """Write the policy as `from_pretrained` reads it."""

    def offload_optimizer(self) -> None:
        """Take optimizer states and gradients off the device."""

    def offload_parameters(self) -> None:
        """Take weights off the device."""

    def onload(self) -> None:
        """Bring weights and optimizer states back."""

    def memory_bytes(self) -> int:
        """Return how many bytes all of these take on the device."""

    def close(self) -> None:
        """Free everything."""


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor on the host as an array; bfloat16, which numpy has not, as that of ml_dtypes."""
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array


@define(eq=False)
class LocalTrainer:
    """
    A trainer in this process.

    Attributes:
        learner: with all of the model.
        source: folder of the model that training began with; its tokenizer goes along with exports.
    """

    learner: Learner
    source: Path

    def update(self, batch: RolloutBatch, *, step: int, version: int) -> dict[str, float]:
        """Learn from a batch."""
        return self.learner.update(batch, step=step, version=version)

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the policy's weights."""
        for name, tensor in self.learner.policy.full_weights():
            yield name, as_array(tensor)

    def save(self, folder: Path) -> None:
        """Write what training goes on from."""
        from turnwise_grpo_trainer.model_state import save_state

        save_state(self.learner, folder)

    def load(self, folder: Path) -> None:
        """Stand where `save` was called."""
        from turnwise_grpo_trainer.model_state import load_state

        load_state(self.learner, folder)

    def export(self, folder: Path) -> None:
        """Write the policy with its tokenizer."""
        export(self.learner.policy, self.source, folder, write=self.learner.rank == 0)

    def offload_optimizer(self) -> None:
        """Take optimizer states and gradients off the device."""
        for trained in self._trained():
            trained.optimizer.zero_grad()
            _move_states(trained, torch.device("cpu"))

    def offload_parameters(self) -> None:
        """Take weights off the device."""
        for model in self._models():
            model.to("cpu")
        _release(self.learner.device)

    def onload(self) -> None:
        """Bring weights and optimizer states back."""
        for model in self._models():
            model.to(self.learner.device)
        for trained in self._trained():
            _move_states(trained, self.learner.device)

    def memory_bytes(self) -> int:
        """Return how many bytes weights and optimizer states take on the device."""
        tensors = [parameter for model in self._models() for parameter in model.parameters()]
        tensors += [value for trained in self._trained() for value in _states(trained)]
        here = self.learner.device.type
        return sum(_local(tensor).nbytes for tensor in tensors if tensor.device.type == here)

    def close(self) -> None:
        """Free nothing: the objects go with the process."""

    def _trained(self) -> list[Trained]:
        return [each for each in (self.learner.policy, self.learner.critic) if each is not None]

    def _models(self) -> list[Any]:
        return [*(each.model for each in self._trained()), *filter(None, [self.learner.reference])]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _states(trained: Trained) -> Iterator[Tensor]:
    # AdamW keeps its step count, which has no axes, on the host.
    for state in trained.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _move_states(trained: Trained, device: torch.device) -> None:
    for state in trained.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(device)
    _release(device)


def _release(device: torch.device) -> None:
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def export(trained: Trained, source: Path, folder: Path, *, write: bool = True) -> None:
    """Write a policy's whole weights with the config and tokenizer of the model it began as, as safetensors."""
    weights = dict(trained.full_weights())
    if not write:
        return
    trained.model.save_pretrained(folder, state_dict=weights)
    for file in sorted(source.iterdir()):
        if not (folder / file.name).exists() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            (folder / file.name).write_bytes(file.read_bytes())


def num_parameters(model: Any) -> int:
    """Return how many numbers a model has."""
    return int(np.sum([parameter.numel() for parameter in model.parameters()]))
