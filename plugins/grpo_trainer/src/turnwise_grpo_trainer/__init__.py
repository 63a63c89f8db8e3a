"""A trainer for turnwise: the commands `turnwise train` and `turnwise eval`."""

from __future__ import annotations

import turnwise
from turnwise_grpo_trainer.eval_command import EvalCommand
from turnwise_grpo_trainer.train_command import TrainCommand


@turnwise.hookimpl
def register_commands(registry: turnwise.Registry[turnwise.Command]) -> None:
    """Register `train` and `eval`."""
    registry.add("train", TrainCommand)
    registry.add("eval", EvalCommand)
