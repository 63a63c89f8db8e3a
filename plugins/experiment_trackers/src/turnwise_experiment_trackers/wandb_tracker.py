"""The observer `wandb`: one Weights & Biases run for each training."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from attrs import define, field, frozen, validators

from turnwise import Observer, Resources
from turnwise.errors import ConfigError
from turnwise.events.observer import MetricsLogged, Place, TrainingStarted
from turnwise_experiment_trackers.samples import HEADINGS, read_samples
from turnwise_experiment_trackers.tracker import check_installed, load_run_id, save_run_id


@frozen(kw_only=True)
class WandbConfig:
    """
    Options of `wandb`. The API key comes from `wandb login` or `WANDB_API_KEY`, never from a config.

    Attributes:
        project: W&B project of the run.
        entity: W&B user or team; null uses the account's default.
        group: W&B group of the run.
        run_name: display name; null lets W&B choose one.
        tags: tags of the run.
        samples: most trajectories of a step in a table `samples`, with their texts, which W&B then stores; 0 logs none.
        mode: `online` or `offline` (upload later with `wandb sync`); null uses `WANDB_MODE`, or else `online`.
    """

    project: str = "turnwise"
    entity: str | None = None
    group: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()
    samples: int = field(default=0, validator=validators.ge(0))
    mode: Literal["online", "offline"] | None = None


@define(eq=False)
class WandbTracker(Observer):
    """Logs settings and metrics to W&B; W&B writes its files to the training's folder."""

    place: ClassVar[Place] = "driver"
    config: WandbConfig
    _run: Any = field(default=None, init=False)
    _training: TrainingStarted | None = field(default=None, init=False)

    def open(self) -> None:
        import wandb

        if (self.config.mode or os.environ.get("WANDB_MODE") or "online") != "online":
            return
        try:
            logged_in = wandb.login()
        except wandb.errors.Error as error:
            raise ConfigError(f"observer wandb: cannot log in: {' '.join(str(error).split())}") from error
        if not logged_in:
            raise ConfigError("observer wandb: not logged in: run `wandb login` or set `mode: offline`")

    def on_training_started(self, event: TrainingStarted) -> None:
        import wandb

        self._training = event
        self._run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            group=self.config.group,
            name=self.config.run_name,
            tags=list(self.config.tags) or None,
            mode=self.config.mode,
            dir=str(event.folder),
            config=dict(event.settings),
            id=load_run_id(event, "wandb"),
            resume="allow",
            reinit="create_new",
        )
        # W&B rejects a step below its own counter, but a resumed training logs the steps after its checkpoint again.
        self._run.define_metric("*", step_metric="step")
        save_run_id(event, "wandb", self._run.id)

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        import wandb

        samples = read_samples(self._training, event, self.config.samples)
        rows = [list(each.cells) for each in samples]
        table = {"samples": wandb.Table(columns=list(HEADINGS), data=rows)} if rows else {}
        self._run.log({**event.values, **table, "step": event.step})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def make_wandb(config: WandbConfig, resources: Resources) -> Observer:
    """Build the observer; raise `ConfigError` if W&B is not installed."""
    check_installed("wandb")
    return WandbTracker(config)
