"""Observers that log trainings to Weights & Biases, MLflow and TensorBoard; a run imports the library that it uses."""

from __future__ import annotations

import turnwise
from turnwise_experiment_trackers.mlflow_tracker import MlflowConfig, make_mlflow
from turnwise_experiment_trackers.tensorboard_tracker import TensorboardConfig, make_tensorboard
from turnwise_experiment_trackers.wandb_tracker import WandbConfig, make_wandb


@turnwise.hookimpl
def register_observers(registry: turnwise.Registry[turnwise.Observer]) -> None:
    """Add `wandb`, `mlflow` and `tensorboard`."""
    registry.add("wandb", make_wandb, config=WandbConfig)
    registry.add("mlflow", make_mlflow, config=MlflowConfig)
    registry.add("tensorboard", make_tensorboard, config=TensorboardConfig)
