"""Weights & Biases and MLflow for trainings. Only the hook stands here; both are imported when a run uses them."""

from __future__ import annotations

import turnwise
from turnwise_experiment_trackers.mlflow_tracker import MlflowConfig, make_mlflow
from turnwise_experiment_trackers.wandb_tracker import WandbConfig, make_wandb


@turnwise.hookimpl
def register_observers(registry: turnwise.Registry[turnwise.Observer]) -> None:
    """Add `wandb` and `mlflow`."""
    registry.add("wandb", make_wandb, config=WandbConfig)
    registry.add("mlflow", make_mlflow, config=MlflowConfig)
