"""The metrics of a training: a series of steps and values for each name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from turnwise.errors import DataError, first_line
from turnwise.types import JsonDict

METRICS_FILE: Final = "metrics.jsonl"
_LARGEST_STEP: Final = 2**53
"""Above it, the page's numbers are not exact."""

_Values = dict[str, float | None]


@frozen
class TrainingMetrics:
    """
    The log of a training.

    Attributes:
        series: `{"steps": [...], "values": [...]}` by name, with null for numbers that are not finite; None without a
            log.
        problem: the first line that is no such line, in whole or in part, and how many more there are; None if all
            are.
    """

    series: JsonDict | None = None
    problem: str | None = None

    def as_json(self) -> JsonDict:
        """Return the answer of the API."""
        return {"series": self.series, "problem": self.problem}


def read_series(folder: Path) -> TrainingMetrics:
    """
    Return the logged metrics of a training. A line that is damaged costs its own values only.

    A last line without its newline is left out: the training is writing it, or was killed.

    Raises:
        DataError: the file cannot be read.
    """
    file = folder / METRICS_FILE
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return TrainingMetrics()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    series: dict[str, dict[str, list[Any]]] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        try:
            step, values = _read_line(line)
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"{METRICS_FILE}, line {number}: not the metrics of a step: {first_line(error)}")
            continue
        for name, value in values.items():
            if value is None or isinstance(value, int | float):
                each = series.setdefault(name, {"steps": [], "values": []})
                each["steps"].append(step)
                each["values"].append(_finite(value))
            else:
                problems.append(f"{METRICS_FILE}, line {number}: {name!r} is no number, but {value!r:.40}")
    return TrainingMetrics(dict(series), _summarize(problems))


def _read_line(line: bytes) -> tuple[int, dict[str, object]]:
    values = json.loads(line.decode("utf-8"))
    if not isinstance(values, dict):
        raise TypeError(f"it is {values!r:.40}")
    if "step" not in values:
        raise ValueError("it has no step")
    step = values.pop("step")
    if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
        raise ValueError(f"its step is {step!r:.40}, not a whole number from 0")
    return step, values


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def _summarize(problems: list[str]) -> str | None:
    if not problems:
        return None
    more = len(problems) - 1
    return problems[0] + (f"; {more} more {'line is' if more == 1 else 'lines are'} wrong" if more else "")
