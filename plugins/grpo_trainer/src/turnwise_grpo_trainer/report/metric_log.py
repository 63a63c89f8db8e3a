"""Writes the metrics of a training to a JSONL file, and sends them to the observers of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise.errors import ConfigError
from turnwise.events.observer import MetricsLogged, TrainingStarted
from turnwise.files import write_text

METRICS_FILE: Final = "metrics.jsonl"


def read_metrics(out: Path, *, up_to: int | None = None) -> list[dict[str, Any]]:
    """
    Return the logged metrics of a training, one dict per line.

    Args:
        out: folder of the training.
        up_to: exclude later steps; None includes all.

    Raises:
        ConfigError: a line is not JSON. A last line without a newline is ignored: the training was killed while it
            wrote.
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


def is_metric_log(file: Path) -> bool:
    """Return whether a file can be the log of a training: it has no whole line, or its first one has a step."""
    try:
        with file.open("rb") as stream:
            line = stream.readline()
        return not line.endswith(b"\n") or "step" in json.loads(line)
    except (OSError, ValueError, TypeError, RecursionError):
        return False


@define(eq=False)
class MetricLog:
    """
    Logs the metrics of each step.

    Attributes:
        out: folder of the training.
        emit: sends an event to the observers of the run, by name.
        settings: the settings of the training, for the observers: plain values.
    """

    out: Path
    emit: Callable[[str, object], None] = field(default=lambda _name, _event: None)
    settings: Mapping[str, Any] = field(factory=dict)

    def start(self, *, from_step: int | None) -> None:
        """
        Start the log, and announce the training to the observers.

        Args:
            from_step: the step to resume from; None for a new training. Lines of later steps, which a killed process
                wrote, are removed.
        """
        resumed = from_step is not None
        kept = read_metrics(self.out, up_to=from_step) if resumed else []
        write_text(self.out / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))
        self.emit("on_training_started", TrainingStarted(folder=self.out, settings=self.settings, resumed=resumed))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step; non-finite values become null in the file."""
        line = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with (self.out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.emit("on_metrics_logged", MetricsLogged(step=step, values=dict(values)))
