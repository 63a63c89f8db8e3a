"""The metrics of a training: a series of steps and values for each name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError
from turnwise.types import JsonDict

METRICS_FILE: Final = "metrics.jsonl"


def read_series(folder: Path) -> JsonDict | None:
    """
    Return the logged metrics of a training by name, as `{"steps": [...], "values": [...]}`; None without a log.

    A last line without its newline is left out: the training is writing it, or was killed.

    Raises:
        DataError: a line is not JSON, or has no step.
    """
    file = folder / METRICS_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    series: dict[str, dict[str, list[float | None]]] = {}
    for number, line in enumerate(text.rpartition("\n")[0].splitlines(), 1):
        values = _read_line(file, number, line)
        step = values.pop("step")
        for name, value in values.items():
            each = series.setdefault(name, {"steps": [], "values": []})
            each["steps"].append(step)
            each["values"].append(value)
    return dict(series)


def _read_line(file: Path, number: int, line: str) -> dict[str, float | None]:
    try:
        values: dict[str, Any] = json.loads(line)
        step = int(values["step"])
        return {"step": step} | {name: _number(value) for name, value in values.items() if name != "step"}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{file}, line {number}: not the metrics of a step: {error!r}") from error


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
