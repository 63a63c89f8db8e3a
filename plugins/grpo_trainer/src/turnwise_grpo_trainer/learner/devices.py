"""The devices of the trainer's processes. A plan needs them too, so this imports torch only to look for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise_grpo_trainer.config import PolicyConfig, TrainConfig

if TYPE_CHECKING:
    import torch


def select_device(config: PolicyConfig) -> torch.device:
    """Return the device to train on."""
    import torch

    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpus_per_process(train: TrainConfig) -> float:
    """Return how many GPUs Ray reserves for each process: as configured, or 1 if it trains on a GPU."""
    if train.sharding.gpus_per_process is not None:
        return train.sharding.gpus_per_process
    if train.policy.device == "cpu":
        return 0.0
    return float(select_device(train.policy).type == "cuda")
