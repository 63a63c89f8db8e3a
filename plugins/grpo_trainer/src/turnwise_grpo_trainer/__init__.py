"""A trainer for turnwise: the commands `turnwise train`, `turnwise eval` and `turnwise export`."""

from __future__ import annotations

from functools import partial
from typing import Any

import turnwise
from turnwise_grpo_trainer.objective import hooks, replays, scorers
from turnwise_grpo_trainer.objective.estimators import OWN_ESTIMATORS
from turnwise_grpo_trainer.objective.loss_options import (
    CispoConfig,
    ClipConfig,
    DualClipConfig,
    GspoConfig,
    PathCreditConfig,
)


def _train(config: turnwise.NoConfig, resources: turnwise.Resources) -> turnwise.Command:
    from turnwise_grpo_trainer.commands.train_command import TrainCommand

    return TrainCommand(config, resources)


def _eval(config: turnwise.NoConfig, resources: turnwise.Resources) -> turnwise.Command:
    from turnwise_grpo_trainer.commands.eval_command import EvalCommand

    return EvalCommand(config, resources)


def _export(config: turnwise.NoConfig, resources: turnwise.Resources) -> turnwise.Command:
    from turnwise_grpo_trainer.commands.export_command import ExportCommand

    return ExportCommand(config, resources)


@turnwise.hookimpl
def register_commands(registry: turnwise.Registry[turnwise.Command]) -> None:
    """Register `train`, `eval` and `export`."""
    registry.add("train", _train)
    registry.add("eval", _eval)
    registry.add("export", _export)


@turnwise.hookimpl
def add_hookspecs(specs: turnwise.HookSpecs) -> None:
    """Add the hooks of losses, advantages, replays and scorers, which other plugins may use."""
    specs.add(hooks.register_losses, part="loss", contract=hooks.PolicyLoss)
    specs.add(hooks.register_advantages, part="advantage", contract=hooks.AdvantageEstimator)
    specs.add(replays.register_replays, part="replay", contract=replays.Replay)
    specs.add(scorers.register_scorers, part="scorer", contract=scorers.Scorer)


@turnwise.hookimpl
def register_losses(registry: turnwise.Registry[Any]) -> None:
    """Register the losses; `ppo_clip` is the default, see `turnwise_grpo_trainer.objective.hooks`."""
    registry.add("ppo_clip", partial(_make_loss, "ClippedLoss"), config=ClipConfig)
    registry.add("dual_clip", partial(_make_loss, "DualClipLoss"), config=DualClipConfig)
    registry.add("gspo", partial(_make_loss, "GspoLoss"), config=GspoConfig)
    registry.add("cispo", partial(_make_loss, "CispoLoss"), config=CispoConfig)


@turnwise.hookimpl
def register_advantages(registry: turnwise.Registry[Any]) -> None:
    """Register the estimators of groups and of time steps, and the one of parallel paths."""
    for name, estimator in OWN_ESTIMATORS.items():
        registry.add(name, partial(_find_estimator, estimator))
    registry.add("path_credit", _make_path_credit, config=PathCreditConfig)


def _find_estimator(estimator: object, _config: object, _resources: turnwise.Resources) -> Any:
    return estimator


def _make_path_credit(config: PathCreditConfig, _resources: turnwise.Resources) -> Any:
    from turnwise_grpo_trainer.objective.path_credit import PathCredit  # it imports torch

    return PathCredit(config)


def _make_loss(name: str, config: object, _resources: turnwise.Resources) -> Any:
    from turnwise_grpo_trainer.objective import registered_losses

    return getattr(registered_losses, name)(config)
