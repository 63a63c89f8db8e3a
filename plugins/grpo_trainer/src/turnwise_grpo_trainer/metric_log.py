"""Where the numbers of a training go: a JSONL file, TensorBoard, and the observers of the run."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise.errors import ConfigError
from turnwise.observer import MetricsLogged, TrainingStarted

METRICS_FILE: Final = "metrics.jsonl"
TENSORBOARD_FOLDER: Final = "tensorboard"


def read_metrics(out: Path, *, up_to: int | None = None) -> list[dict[str, Any]]:
    """
    Return the lines that a training has written, those of later steps left out.

    Raises:
        ConfigError: a line is not JSON. A last one without its end is no line: the training was killed in the midst.
    """
    file = out / METRICS_FILE
    if not file.exists():
        return []
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    try:
        lines = [json.loads(line) for line in whole.splitlines() if line]
    except ValueError as error:
        raise ConfigError(f"{file}: not the metrics of a training: {error}") from error
    return [line for line in lines if up_to is None or line["step"] <= up_to]


@define(eq=False)
class MetricLog:
    """
    Writes the numbers of each step.

    Attributes:
        out: folder of the training.
        emit: tells the observers of the run, by the name of an event.
        settings: what the training is, for these: plain values.
    """

    out: Path
    emit: Callable[[str, object], None] = field(default=lambda _name, _event: None)
    settings: Mapping[str, Any] = field(factory=dict)
    _writer: Any = field(default=None, init=False)

    def start(self, *, from_step: int | None) -> None:
        """
        Open everything.

        Args:
            from_step: that the training goes on from; None for a new one. Lines of later steps, which an interrupted
                training wrote, are dropped.
        """
        resumed, last = from_step is not None, -1 if from_step is None else from_step
        kept = read_metrics(self.out, up_to=last)
        (self.out / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        tensorboard = _module("torch.utils.tensorboard", "tensorboard")
        self._writer = tensorboard.SummaryWriter(str(self.out / TENSORBOARD_FOLDER), purge_step=last + 1)
        self.emit("on_training_started", TrainingStarted(folder=self.out, settings=self.settings, resumed=resumed))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step; those that are not finite are null in the file."""
        line = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with (self.out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self.emit("on_metrics_logged", MetricsLogged(step=step, values=dict(values)))

    def close(self) -> None:
        """Close what `start` opened."""
        if self._writer is not None:
            self._writer.close()


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"train: the numbers need {package}: pip install {package}") from error
