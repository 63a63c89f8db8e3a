"""The observer `tensorboard`: event files in the training's folder."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from attrs import define, field, frozen, validators

from turnwise import Observer, Resources
from turnwise.events.observer import MetricsLogged, Place, TrainingStarted
from turnwise_experiment_trackers.samples import read_samples
from turnwise_experiment_trackers.tracker import check_installed

EVENTS_FOLDER: Final = "tensorboard"


@frozen(kw_only=True)
class TensorboardConfig:
    """
    Options of `tensorboard`.

    Attributes:
        samples: most trajectories of a step that are logged as text.
    """

    samples: int = field(default=8, validator=validators.ge(0))


@define(eq=False)
class TensorboardTracker(Observer):
    """Logs metrics as scalars, and samples as text, to `tensorboard/` in the training's folder."""

    place: ClassVar[Place] = "driver"
    config: TensorboardConfig = field(factory=TensorboardConfig)
    _training: TrainingStarted | None = field(default=None, init=False)
    _writer: Any = field(default=None, init=False)

    def on_training_started(self, event: TrainingStarted) -> None:
        self._training = event

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        if self._writer is None:
            self._writer = _open_writer(self._training, event)
        for name, value in event.values.items():
            self._writer.add_scalar(name, value, event.step)
        samples = read_samples(self._training, event, self.config.samples)
        if samples:
            self._writer.add_text("samples", "\n\n---\n\n".join(each.as_markdown() for each in samples), event.step)
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _open_writer(training: TrainingStarted | None, first: MetricsLogged) -> Any:
    """Return a writer that hides earlier events of the steps that this part of the training logs."""
    from torch.utils.tensorboard import SummaryWriter

    if training is None:
        raise RuntimeError("observer tensorboard: metrics were logged before the training was started")
    # A resumed training logs the steps after its checkpoint again, the first one here. Only if the validation of the
    # checkpoint's own step was still to be made, the first metrics are that validation, and the step's others stay.
    only_validation = all(name.startswith("validation/") for name in first.values)
    purge_step = first.step + only_validation if training.resumed else 0
    return SummaryWriter(str(training.folder / EVENTS_FOLDER), purge_step=purge_step)


def make_tensorboard(config: TensorboardConfig, resources: Resources) -> Observer:
    """Build the observer; raise `ConfigError` if TensorBoard is not installed."""
    check_installed("tensorboard")
    return TensorboardTracker(config)
