"""Where the numbers of a training go: a JSONL file, TensorBoard, and W&B or MLflow when they are asked for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise.errors import ConfigError

METRICS_FILE: Final = "metrics.jsonl"
TENSORBOARD_FOLDER: Final = "tensorboard"


def read_metrics(out: Path, *, up_to: int | None = None) -> list[dict[str, Any]]:
    """Return the lines that a training has written, those of later steps left out."""
    file = out / METRICS_FILE
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return [line for line in lines if up_to is None or line["step"] <= up_to]


@define(eq=False)
class MetricLog:
    """
    Writes the numbers of each step.

    Attributes:
        out: folder of the training.
        loggers: `wandb`, `mlflow`.
        settings: what the training is, for these.
    """

    out: Path
    loggers: Sequence[str] = ()
    settings: Mapping[str, Any] = field(factory=dict)
    _writer: Any = field(default=None, init=False)
    _sinks: list[Any] = field(factory=list, init=False)

    def start(self, *, from_step: int) -> None:
        """Open everything; lines after `from_step` that an interrupted training wrote are dropped."""
        kept = read_metrics(self.out, up_to=from_step)
        (self.out / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        tensorboard = _module("torch.utils.tensorboard", "tensorboard")
        self._writer = tensorboard.SummaryWriter(str(self.out / TENSORBOARD_FOLDER), purge_step=from_step + 1)
        for name in self.loggers:
            module = _module(name, name)
            if name == "wandb":
                run = module.init(dir=str(self.out), config=dict(self.settings), resume="allow")
                self._sinks.append(lambda step, values, run=run: run.log(dict(values), step=step))
            else:
                module.start_run()
                module.log_params({key: str(value)[:500] for key, value in self.settings.items()})
                self._sinks.append(lambda step, values, module=module: module.log_metrics(dict(values), step=step))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step; those that are not finite are null in the file."""
        line = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with (self.out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        for sink in self._sinks:
            sink(step, values)

    def close(self) -> None:
        """Close what `start` opened."""
        if self._writer is not None:
            self._writer.close()
        for name in self.loggers:
            module = importlib.import_module(name)
            (module.finish if name == "wandb" else module.end_run)()


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"train: the numbers need {package}: pip install {package}") from error
