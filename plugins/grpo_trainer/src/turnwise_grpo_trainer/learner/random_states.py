"""
The random number generators of each training process: their seeds, and their states in checkpoints.

Dropout draws from them. Each process draws its own numbers, so a checkpoint has a file of each process, in JSON.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch


def seed_torch(*seeds: int) -> None:
    """Seed torch on all devices; different seeds, such as a run's and a process's, give other numbers."""
    torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))


def save_random_states(folder: Path, rank: int, world_size: int, device: torch.device) -> None:
    """Write the states of torch, numpy and Python in this process."""
    states: dict[str, object] = {
        "torch": _to_text(torch.get_rng_state()),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    _path(folder, rank, world_size).write_text(json.dumps(states, default=_as_list), encoding="utf-8")


def load_random_states(folder: Path, rank: int, world_size: int, device: torch.device) -> None:
    """
    Restore the states of this process.

    A checkpoint of another number of processes has none for this one, nor has one without files of states. Then the
    generators stay as they are, which is logged: the training continues with other random numbers.
    """
    path = _path(folder, rank, world_size)
    if not path.exists():
        if rank == 0:
            structlog.get_logger().warning(
                "random states are not restored: dropout draws other numbers than without the interruption",
                checkpoint=str(folder),
                processes=world_size,
                reason=f"{path.name} is missing: the checkpoint has another number of processes, or is old",
            )
        return
    states = json.loads(path.read_text(encoding="utf-8"))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    key = np.array(states["numpy"]["state"]["key"], np.uint32)
    np.random.set_state(states["numpy"] | {"state": states["numpy"]["state"] | {"key": key}})
    torch.set_rng_state(_from_text(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_from_text(states["cuda"]), device)


def _path(folder: Path, rank: int, world_size: int) -> Path:
    return folder / f"random-{rank}-of-{world_size}.json"


def _as_list(array: Any) -> Any:
    return array.tolist()


def _to_text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
