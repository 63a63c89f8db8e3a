"""
Models, optimizers, schedules and random numbers, to a folder and back, by `torch.distributed.checkpoint`.

Every process of a training takes part; a checkpoint of one number of processes can be read by another. Torch keeps the
table of contents as a pickle: load only checkpoints that you trust.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.learner import Learner
from turnwise_grpo_trainer.optimization import Trained

SCHEDULES_FILE: Final = "schedules.json"


def save_state(learner: Learner, folder: Path) -> None:
    """Write all that the learner goes on from."""
    folder.mkdir(parents=True, exist_ok=True)
    _quietly(save)(_state(learner), checkpoint_id=folder, no_dist=not dist.is_initialized())
    if learner.rank == 0:
        places = {name: trained.schedule.last_epoch for name, trained in _parts(learner).items()}
        (folder / SCHEDULES_FILE).write_text(json.dumps(places), encoding="utf-8")


def load_state(learner: Learner, folder: Path) -> None:
    """Stand where `save_state` was called; `ConfigError` when the folder holds another model or none."""
    state = _state(learner)
    try:
        _quietly(load)(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        places = json.loads((folder / SCHEDULES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise ConfigError(f"{folder}: not a checkpoint of this model: {_cause(error)}") from error
    for name, trained in _parts(learner).items():
        set_state_dict(
            trained.model,
            trained.optimizer,
            model_state_dict=state[name]["model"],
            optim_state_dict=state[name]["optimizer"],
        )
        trained.stand_at(places[name])
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"])


def _cause(error: BaseException) -> str:
    """Return the first line of what went wrong; torch wraps what went wrong in a process."""
    cause = error
    if isinstance(error, CheckpointException):
        cause = next((each for each, _trace in error.failures.values()), error)
    return f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function without torch's warning that there is one process, which is what was asked for.

    Ctrl-C comes out as what it is, which torch takes for a failure of its own.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                return function(*arguments, **options)
            except CheckpointException as error:
                if any(isinstance(each, KeyboardInterrupt) for each, _trace in error.failures.values()):
                    raise KeyboardInterrupt from error
                raise

    return call


def _parts(learner: Learner) -> dict[str, Trained]:
    return {"policy": learner.policy} | ({"critic": learner.critic} if learner.critic else {})


def _state(learner: Learner) -> dict[str, Any]:
    state: dict[str, Any] = {"rng": torch.get_rng_state()}
    if learner.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state()
    for name, trained in _parts(learner).items():
        model, optimizer = get_state_dict(trained.model, trained.optimizer)
        state[name] = {"model": model, "optimizer": optimizer}
    return state
