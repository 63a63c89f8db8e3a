"""A model with its optimizer and schedule: torch's AdamW, LambdaLR and gradient clipping."""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from attrs import define
from torch import Tensor

from turnwise_grpo_trainer.config import OptimizerConfig


@define(eq=False)
class Trained:
    """
    A model, its optimizer and its schedule.

    Attributes:
        model: in training mode.
        optimizer: AdamW over its parameters.
        schedule: of the learning rate, moved once a training step.
        grad_clip: largest norm of its gradient; None clips nothing.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    grad_clip: float | None

    @classmethod
    def of(cls, model: Any, config: OptimizerConfig, *, lr: float, num_steps: int) -> Trained:
        """Make the optimizer of a model; a falling schedule ends at step `num_steps`."""
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, num_steps))
        return cls(model, optimizer, schedule, config.grad_clip)

    def stand_at(self, place: int) -> None:
        """
        Go on from a step of the schedule, with the optimizer's state as it was loaded and the settings of the config.

        What is loaded brings the settings along that it was saved with.
        """
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group |= {**self.optimizer.defaults, "lr": rate * self.schedule.lr_lambdas[0](place), "initial_lr": rate}
        self.schedule.last_epoch = place

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> float:
        """Clip the gradient, step and clear it; return its norm. A norm that is not finite changes no weight."""
        limit = math.inf if self.grad_clip is None else self.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        total = float(_whole(norm))
        if math.isfinite(total):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yield the weights by name, whole and on the host, one at a time; every process must take all of them.

        Tied weights come once, under their first name.
        """
        own = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - own
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                yield name, _whole(tensor).detach().cpu()


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def lr_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the share of the learning rate that is in force at a step, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
