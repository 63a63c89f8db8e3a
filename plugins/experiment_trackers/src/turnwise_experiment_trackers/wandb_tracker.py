"""The observer `wandb`: a run of Weights & Biases for each training."""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar, Literal

from attrs import define, field, frozen

from turnwise import Observer, Resources
from turnwise.errors import ConfigError
from turnwise.observer import MetricsLogged, Place, TrainingStarted
from turnwise_experiment_trackers.tracker import keep_run_id, kept_run_id, require


@frozen(kw_only=True)
class WandbConfig:
    """
    Options of `wandb`. The key comes from `wandb login` or from `WANDB_API_KEY`, never from a config.

    Attributes:
        project: that the run belongs to.
        entity: user or team; null is the default of the account.
        group: that the run belongs to.
        run_name: shown for the run; null lets W&B choose one.
        tags: of the run.
        mode: `online`, or `offline`: to be sent later by `wandb sync`; null is what `WANDB_MODE` says, else online.
    """

    project: str = "turnwise"
    entity: str | None = None
    group: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None


@define(eq=False)
class WandbTracker(Observer):
    """Sends settings and numbers; files of W&B lie in the folder of the training."""

    place: ClassVar[Place] = "driver"
    config: WandbConfig
    _library: Any = field(default=None, init=False)
    _run: Any = field(default=None, init=False)

    @property
    def mode(self) -> str:
        """The mode that is in force."""
        return self.config.mode or os.environ.get("WANDB_MODE") or "online"

    def open(self) -> None:
        """Log in; `ConfigError` when that is not possible, before anything is trained."""
        self._library = importlib.import_module("wandb")
        if self.mode != "online":
            return
        try:
            known = self._library.login()
        except self._library.errors.Error as error:
            raise ConfigError(f"observer wandb: cannot log in: {' '.join(str(error).split())}") from error
        if not known:
            raise ConfigError("observer wandb: not logged in: run `wandb login`, or set the option mode: offline")

    def on_training_started(self, event: TrainingStarted) -> None:
        """Begin a run, or go on with the one that the training had."""
        self._run = self._library.init(
            project=self.config.project,
            entity=self.config.entity,
            group=self.config.group,
            name=self.config.run_name,
            tags=list(self.config.tags) or None,
            mode=self.mode,
            dir=str(event.folder),
            config=dict(event.settings),
            id=kept_run_id(event, "wandb"),
            resume="allow",
            reinit="create_new",
        )
        # W&B's own steps never go back, as those of a training do that resumes from a checkpoint.
        self._run.define_metric("*", step_metric="step")
        keep_run_id(event, "wandb", self._run.id)

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        """Send the numbers of a step."""
        self._run.log({**event.values, "step": event.step})

    def close(self) -> None:
        """End the run, waiting until all was sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def make_wandb(config: WandbConfig, resources: Resources) -> Observer:
    """Return the observer; `ConfigError` when W&B is not installed."""
    require("wandb")
    return WandbTracker(config)
