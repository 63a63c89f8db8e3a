"""Scores that are reported for a session from outside: each counts once, and each report has a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import TurnwiseError

MAX_NUMBER: Final = float(np.finfo(np.float32).max)
"""Largest score, because records hold scores as float32."""

_MAX_METRICS: Final = 256
_MAX_NAME: Final = 128

Target = Literal["session", "records", "turns"]


class ControlError(TurnwiseError):
    """A request or a number that a control port does not accept."""


class Verdict(StrEnum):
    """
    Effect of the news of an attempt.

    `ACCEPTED` changed the rollout, `REPEATED` had changed it before, `CONFLICT` contradicts earlier news of the same
    attempt, `LATE` is of an attempt that has ended, and `UNKNOWN` is of one that never was. Only `ACCEPTED` changes
    anything.
    """

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    CONFLICT = "conflict"
    LATE = "late"
    UNKNOWN = "unknown"


@frozen(kw_only=True)
class ScoreReport:
    """
    One score.

    Attributes:
        id: chosen by the client; a report that it repeats has the same.
        score: finite.
        record: number of the record that it scores, from 0.
        turn: id of the turn that it scores.
        metrics: finite numbers for the logs.
    """

    id: str
    score: float
    record: int | None = None
    turn: str | None = None
    metrics: Mapping[str, float] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.id or len(self.id) > 128:
            raise ControlError("'id' must have 1 to 128 characters")
        check_number("score", self.score)
        check_metrics(self.metrics)
        if self.record is not None and self.turn is not None:
            raise ControlError("a score is for a record or a turn, not for both")
        if self.record is not None:
            check_index("record", self.record)

    @property
    def target(self) -> tuple[Target, int | str]:
        """The kind of thing that it scores, and its number or its id."""
        if self.turn is not None:
            return "turns", self.turn
        return ("session", 0) if self.record is None else ("records", self.record)


def check_index(name: str, value: object) -> None:
    """Raise a `ControlError` unless the value is a whole number from 0."""
    if type(value) is not int or value < 0:
        raise ControlError(f"{name!r} must be a whole number from 0: {value!r}")


def check_number(name: str, value: object) -> None:
    """Raise a `ControlError` unless the value is a finite number of at most `MAX_NUMBER`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ControlError(f"{name!r} must be a finite number of at most {MAX_NUMBER:.2g}: {str(value)[:40]!r}")


def check_metrics(metrics: object) -> dict[str, float]:
    """Return metrics; `ControlError` unless they are an object of numbers with short names."""
    if not isinstance(metrics, dict) or len(metrics) > _MAX_METRICS:
        raise ControlError(f"'metrics' must be an object of at most {_MAX_METRICS} numbers")
    for name, value in metrics.items():
        if not 1 <= len(name) <= _MAX_NAME:
            raise ControlError(f"the name of a metric must have 1 to {_MAX_NAME} characters: {name[:40]!r}")
        check_number(f"metrics.{name}", value)
    return metrics


@define(eq=False)
class ScoreBoard:
    """
    The scores of a session: one for the session, or one for each of its records, or one for each of its turns.

    Attributes:
        num_late: scores that came after the end.
    """

    num_late: int = field(default=0, init=False)
    _by_id: dict[str, ScoreReport] = field(factory=dict, init=False)
    _by_target: dict[tuple[Target, int | str], ScoreReport] = field(factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)

    def report(self, report: ScoreReport) -> Verdict:
        """
        Note a score.

        Returns:
            `REPEATED` for an equal report with the same id, also after the end; `LATE` after the end; `CONFLICT` for
            another report with the same id, for a second score of one thing, and for scores of two kinds of things.

        Raises:
            ControlError: the sum of the scores or of a metric would be too large.
        """
        if (known := self._by_id.get(report.id)) is not None:
            return Verdict.REPEATED if known == report else Verdict.CONFLICT
        if self._is_closed:
            self.num_late += 1
            return Verdict.LATE
        kinds = {kind for kind, _number in self._by_target}
        if report.target in self._by_target or kinds - {report.target[0]}:
            return Verdict.CONFLICT
        self._check_sums(report)
        self._by_id[report.id] = self._by_target[report.target] = report
        return Verdict.ACCEPTED

    def _check_sums(self, report: ScoreReport) -> None:
        """Refuse a report with which a sum can no longer be stored: each number fits, and many of them need not."""
        reports = [*self._by_target.values(), report]
        check_number("score", sum(abs(each.score) for each in reports))
        for name in report.metrics:
            check_number(f"metrics.{name}", sum(abs(each.metrics.get(name, 0.0)) for each in reports))

    def close(self) -> None:
        """Accept no further score."""
        self._is_closed = True

    def reported(self, *, num_records: int) -> object:
        """
        Return the scores as JSON; None when nothing was scored.

        They are the number for the session, ``{"turns": {ID: SCORE}}`` with the turns that have a score, or
        ``{"records": [...]}`` with a number for each record, 0 for a record without a score.

        Raises:
            ControlError: a score is for a record that the session does not have.
        """
        if not self._by_target:
            return None
        kind = next(iter(self._by_target))[0]
        if kind == "session":
            return float(self._by_target["session", 0].score)
        if kind == "turns":
            return {"turns": {report.turn: float(report.score) for report in self._by_target.values()}}
        values = [0.0] * num_records
        for report in self._by_target.values():
            if report.record is None or report.record >= num_records:
                raise ControlError(f"the session has {num_records} records, and no number {report.record}")
            values[report.record] = float(report.score)
        return {"records": values}

    @property
    def metrics(self) -> dict[str, float]:
        """Sums of the metrics of all scores."""
        sums: dict[str, float] = {}
        for report in self._by_target.values():
            for name, value in report.metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
