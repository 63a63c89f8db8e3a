"""A model with its optimizer and learning-rate schedule: torch's AdamW, LambdaLR and gradient clipping."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from attrs import define
from torch import Tensor

from turnwise.protocols.weights import TensorSpec
from turnwise_grpo_trainer.config import OptimizerConfig
from turnwise_grpo_trainer.learner.gradient_noise import local_part
from turnwise_grpo_trainer.learner.lora import adapter_weights, base_weights, merged_weights


@define(eq=False)
class TrainableModel:
    """
    A model, its optimizer and its schedule.

    Attributes:
        model: in training mode.
        optimizer: AdamW over the model's parameters that are not frozen.
        schedule: of the learning rate; advanced once per training step.
        grad_clip: largest norm of the gradient; None disables clipping.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    grad_clip: float | None

    @classmethod
    def create(cls, model: Any, config: OptimizerConfig, *, lr: float, num_steps: int) -> TrainableModel:
        """Create the optimizer of a model; a falling schedule reaches its minimum at step `num_steps`."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, num_steps))
        return cls(model, optimizer, schedule, config.grad_clip)

    def seek(self, step: int) -> None:
        """Move the schedule to a step."""
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate * self.schedule.lr_lambdas[0](step)
        self.schedule.last_epoch = step

    def advance(self) -> None:
        """Move the schedule to the next training step."""
        # Not by the schedule's own `step`, which warns if the optimizer has not stepped yet: the critic's warm-up and
        # batches without gradient leave it out on purpose.
        self.seek(self.schedule.last_epoch + 1)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate, until the schedule moves on."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    @torch.no_grad()
    def multiply_with_momentum(self) -> Tensor | None:
        """
        Return the product of the gradient with the mean of the gradients before it; None before the first step.

        The mean is AdamW's first moment without its bias. Of a sharded model, it is the product of this process's part.
        """
        products = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter)
                if parameter.grad is not None and state:
                    gradient, moment = (
                        local_part(each).flatten().float() for each in (parameter.grad, state["exp_avg"])
                    )
                    products.append(gradient @ moment / (1 - group["betas"][0] ** float(state["step"])))
        return torch.stack(products).double().sum().cpu() if products else None

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> float:
        """Clip the gradient, step and clear it; return its norm. A non-finite gradient changes no weight."""
        limit = math.inf if self.grad_clip is None else self.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        total = float(_gather(norm))
        if math.isfinite(total):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yield the names and unsharded weights, with adapters merged, one at a time, on their device.

        Gathering is collective: every process must consume the whole iterator. Tied weights come once, under their
        first name.
        """
        tied = find_tied_names(self.model)
        for name, tensor in merged_weights(self.model, _gather):
            if name not in tied:
                yield name, tensor

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Return what `full_weights` yields, without gathering it."""
        tied = find_tied_names(self.model)
        found = [(name, tensor) for name, tensor, _layer in base_weights(self.model) if name not in tied]
        return tuple(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in found
        )

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded adapters as an engine takes them; collective."""
        yield from adapter_weights(self.model, _gather)


def new_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state that AdamW gives a parameter in its first step: on its device, and sharded as it is."""
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0, dtype=torch.float32), **moments}


def find_tied_names(model: Any) -> set[str]:
    """Return the further names of a model's weights that have several."""
    own = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - own


def find_frozen_names(model: Any) -> set[str]:
    """Return the names of a model's weights that are not trained; they are in its folder, so no checkpoint has them."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def _gather(tensor: Any) -> Tensor:
    """Return the full tensor of a sharded one, and any other as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def lr_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate at a step, counted from 0, as a share of `config.lr`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
