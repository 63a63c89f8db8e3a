"""
Saves and loads models, optimizers, schedules and random number generators, with `torch.distributed.checkpoint`.

Saving and loading are collective: every training process calls them. The number of processes may change in between. The
files are safetensors and JSON, never pickles: reading one from a stranger runs no code. With another number of
processes, random numbers are others: each process has its own generators.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnwise.errors import ConfigError
from turnwise.files import raise_disk_error
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.lora import adapter_scale
from turnwise_grpo_trainer.learner.optimization import (
    TrainableModel,
    find_frozen_names,
    find_tied_names,
    new_moments,
)
from turnwise_grpo_trainer.learner.random_states import load_random_states, save_random_states
from turnwise_grpo_trainer.learner.state_files import StateWriter

SCHEDULES_FILE: Final = "schedules.json"
_SCALE: Final = "adapter_scale"
Moments = dict[str, dict[str, Tensor]]
"""AdamW's state of each weight that has one, by the weight's name."""
_FILE_BYTES: Final = 1 << 27
"""Of a file of tensors. A process that trains on a GPU has a copy of one file in host memory while it writes."""


def save_state(learner: Learner, folder: Path) -> None:
    """Write the state of a learner to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # By default torch would write a pickle beside the tensors, and load values that are no tensors from pickles.
    tensors = _tensors(learner)
    writer = StateWriter(folder, _number_files(tensors))
    _call_torch(save)(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    if learner.rank == 0:
        values: dict[str, float] = {name: each.schedule.last_epoch for name, each in _trainables(learner).items()}
        if (scale := adapter_scale(learner.policy.model)) is not None:
            values[_SCALE] = scale
        (folder / SCHEDULES_FILE).write_text(json.dumps(values), encoding="utf-8")
    save_random_states(folder, learner.rank, learner.world_size, learner.device)


def _number_files(state: Mapping[str, object]) -> dict[str, int]:
    """Return the number of the file of each tensor, from 1, by the dotted path of its keys: files of limited size."""
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for path, num_bytes in _sizes(state):
        if size and size + num_bytes > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[path] = number
        size += num_bytes
    return numbers


def _sizes(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value.nbytes


def load_state(learner: Learner, folder: Path) -> None:
    """Restore the state written by `save_state`; `ConfigError` if the folder holds no state of this model."""
    trainables = _trainables(learner)
    with _config_errors(folder):
        steps = _read_schedules(folder, learner.policy.model)
        saved = _read_names(folder)
        state = {name: _state_to_fill(name, trainable, saved) for name, trainable in trainables.items()}
        _refuse_losses(saved, {f"{name}.model.{each}" for name, (weights, _) in state.items() for each in weights})
        _read({name: _named_tensors(*each) for name, each in state.items()}, folder)
    for name, trainable in trainables.items():
        moments, parameters = state[name][1], _trained_parameters(trainable)
        trainable.optimizer.state.clear()
        trainable.optimizer.state.update({parameters[each]: tensors for each, tensors in moments.items()})
        trainable.seek(steps[name])
    with _config_errors(folder):
        load_random_states(folder, learner.rank, learner.world_size, learner.device)


def load_policy_state(model: Any, folder: Path) -> None:
    """Load the policy's weights of `save_state` into a model on the host; `ConfigError` if they are not of it."""
    weights = _weights(model)
    with _config_errors(folder):
        _read_schedules(folder, model)
        policy = {name for name in _read_names(folder) if name.startswith("policy.")}
        _refuse_losses(policy, {f"policy.model.{name}" for name in weights})
        _read({"policy": {"model": weights}}, folder)


def _read_schedules(folder: Path, model: object) -> dict[str, Any]:
    """Return the steps of the schedules; `ValueError` if the policy's adapters had another scale than the model's."""
    values: dict[str, Any] = json.loads((folder / SCHEDULES_FILE).read_text(encoding="utf-8"))
    scale = adapter_scale(model)
    # The scale is in no tensor, so adapters with another one would load, and be another policy.
    if scale is not None and values.get(_SCALE, scale) != scale:
        raise ValueError(f"alpha / rank of its adapters is {values[_SCALE]:g}, and {scale:g} in train.lora")
    return values


def _refuse_losses(saved: Set[str], wanted: Set[str]) -> None:
    """`ValueError` if a checkpoint has weights that the model does not train: their initial values would stay."""
    lost = sorted(name for name in saved - wanted if name.split(".")[1] == "model")
    if lost:
        raise ValueError(f"the config trains {len(lost)} of its weights no longer, such as {lost[0]}")


def _read_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder: the keys of `_tensors`, joined by dots."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _read(state: dict[str, Any], folder: Path) -> None:
    """Fill the tensors of a state from a folder, all processes together."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.read_metadata()  # torch would log a traceback about a damaged file
    _call_torch(load)(state, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise ConfigError(f"{folder}: not a checkpoint of this model: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the first line of an error, unwrapped if torch wrapped the errors of several processes."""
    cause = error
    if isinstance(error, CheckpointException):
        cause = next((each for each, _trace in error.failures.values()), error)
    return f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"


def _call_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wrap a function of torch: suppress its warning about a single process, and re-raise Ctrl-C and errors of the disk.

    Torch would report them as a failed checkpoint.
    """

    def call(*arguments: object, **options: object) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                return function(*arguments, **options)
            except CheckpointException as error:
                # A `CheckpointException` is no `Exception`, so nobody would handle a full disk.
                for each, _trace in error.failures.values():
                    if isinstance(each, KeyboardInterrupt):
                        raise KeyboardInterrupt from error
                    if isinstance(each, OSError) and each.errno is not None:
                        raise OSError(each.errno, each.strerror) from error
                    raise_disk_error(each)
                raise

    return call


def _trainables(learner: Learner) -> dict[str, TrainableModel]:
    return {"policy": learner.policy} | ({"critic": learner.critic} if learner.critic else {})


def _tensors(learner: Learner) -> dict[str, Any]:
    """Return all tensors of a learner's state; the other settings of an optimizer come from the config."""
    # Torch's own `get_state_dict` would make an optimizer step with gradients of 0 if no step came before. It would
    # count in the bias corrections of all later steps, and saving would change the training.
    state: dict[str, object] = {}
    for name, trainable in _trainables(learner).items():
        weights, moments = _weights(trainable.model), trainable.optimizer.state
        found = {each: moments[weight] for each, weight in _trained_parameters(trainable).items() if weight in moments}
        state[name] = _named_tensors(weights, found)
    return state


def _state_to_fill(name: str, trainable: TrainableModel, saved: Set[str]) -> tuple[dict[str, Tensor], Moments]:
    """Return the weights, and the moments that a checkpoint has: a weight that never had a gradient has none."""
    weights, moments = _weights(trainable.model), trainable.optimizer.state
    return weights, {
        each: moments.get(weight) or new_moments(weight)
        for each, weight in _trained_parameters(trainable).items()
        if f"{name}.optimizer.{each}.step" in saved
    }


def _named_tensors(weights: Mapping[str, Tensor], moments: Moments) -> dict[str, Any]:
    return {"model": weights} | ({"optimizer": moments} if moments else {})


def _weights(model: Any) -> dict[str, Tensor]:
    """Return the weights that a checkpoint has, not copies of them: reading into them changes the model."""
    tensors = model.state_dict()
    left_out = find_tied_names(model) | find_frozen_names(model)  # safetensors refuses aliases
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def _trained_parameters(trainable: TrainableModel) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name; call it after `_weights`, which undoes a gathering of sharded ones."""
    return {name: weight for name, weight in trainable.model.named_parameters() if weight.requires_grad}
