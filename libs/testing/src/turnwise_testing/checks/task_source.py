"""
Requirements of every task source, as plain functions without pytest.

A check takes a `TaskSourceProbe` and raises `AssertionError` with a text that describes the failure. The rows become
tasks as in a run. Not covered: whether another process gets the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any

from attrs import frozen

from turnwise.errors import ConfigError, DataError
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal


@frozen(kw_only=True)
class TaskSourceExample:
    """
    A text of a task source, which a path has after the colon.

    Attributes:
        text: with a few rows, because the checks read all of them.
        num_rows: that it has; None when the example does not say.
        error: a part of the one line that refuses the text; empty for a text that is right.
    """

    text: str
    num_rows: int | None = None
    error: str = ""


@frozen(kw_only=True)
class TaskSourceProbe:
    """
    The probe of a task source.

    Attributes:
        make_source: builds it, as the registered factory does. `turnwise_task_files.TaskSource` is its protocol.
        examples: at least one that is right.
    """

    make_source: Callable[[], Any]
    examples: tuple[TaskSourceExample, ...] = ()

    def good(self) -> list[TaskSourceExample]:
        """Return the examples that are right."""
        return [example for example in self.examples if not example.error]


TASK_SOURCE_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
TASK_SOURCES = PartChecks(
    checks=TASK_SOURCE_CHECKS,
    probe=lambda part: TaskSourceProbe(make_source=part.make, examples=part.examples),
    examples="TaskSourceExamples",
)


def _check(function: Callable[[TaskSourceProbe], None]) -> Callable[[TaskSourceProbe], str | None]:
    """Register a check that is skipped without examples."""

    @wraps(function)
    def check(probe: TaskSourceProbe) -> str | None:
        if not probe.good():
            return "no texts are known: a TaskSourceSuite has them in its fixture `examples`"
        function(probe)
        return None

    return register(TASK_SOURCE_CHECKS)(check)


@register(TASK_SOURCE_CHECKS)
def check_fulfils_the_protocol(probe: TaskSourceProbe) -> None:
    """The factory returns an object with `describe` and `rows`."""
    source = probe.make_source()
    missing = [name for name in ("describe", "rows") if not callable(getattr(source, name, None))]
    expect(not missing, f"{type(source).__name__} has no {', '.join(missing)}")


@_check
def check_describes_its_rows(probe: TaskSourceProbe) -> None:
    """`describe` says in one line what the rows of a text are."""
    for example in probe.good():
        line = probe.make_source().describe(example.text)
        expect(isinstance(line, str) and bool(line.strip()), f"describe({example.text!r}) returned {line!r}")
        expect("\n" not in line, f"describe({example.text!r}) returned several lines: {line!r}")


@_check
def check_same_text_same_rows(probe: TaskSourceProbe) -> None:
    """The same text has the same rows, from one object or from several, also when a reader stopped before the end."""
    for example in probe.good():
        source = probe.make_source()
        first = list(source.rows(example.text))
        expect_equal(list(islice(source.rows(example.text), 1)), first[:1], f"the first row of {example.text!r} again")
        expect_equal(list(source.rows(example.text)), first, f"the rows of {example.text!r} again")
        expect_equal(list(probe.make_source().rows(example.text)), first, f"the rows of {example.text!r} by another")
        if example.num_rows is not None:
            expect_equal(len(first), example.num_rows, f"the number of rows of {example.text!r}")


@_check
def check_rows_are_json(probe: TaskSourceProbe) -> None:
    """A row is a mapping of JSON values, which survives a file unchanged."""
    for example in probe.good():
        for number, row in enumerate(probe.make_source().rows(example.text)):
            again = json.loads(json.dumps(row, allow_nan=False))
            expect_equal(again, row, f"row {number} of {example.text!r} after it was written as JSON")


@_check
def check_rows_are_tasks(probe: TaskSourceProbe) -> None:
    """Every text has rows, all of them become tasks, and the uids of the tasks differ."""
    from turnwise_task_files.rows import take_tasks  # a kit without task sources needs none of it

    for example in probe.good():
        rows = enumerate(probe.make_source().rows(example.text))
        tasks = take_tasks(example.text, ((f"row {number}", row) for number, row in rows))
        expect_equal(len({task.uid for task in tasks}), len(tasks), f"the number of uids of {example.text!r}")


@_check
def check_wrong_texts_are_one_line(probe: TaskSourceProbe) -> None:
    """A wrong text is refused in one line, by `describe` as by `rows`, and by no other error."""
    for example in probe.examples:
        source = probe.make_source()
        if example.error:
            _expect_refused(source.describe, example)
            _expect_refused(lambda text: list(probe.make_source().rows(text)), example)


def _expect_refused(call: Callable[[str], object], example: TaskSourceExample) -> None:
    try:
        answer = call(example.text)
    except (ConfigError, DataError) as error:
        line = str(error)
        expect("\n" not in line and example.error in line, f"expected {example.error!r} in one line, got {line!r}")
    else:
        raise AssertionError(f"{example.text!r} was not refused: {answer!r}")
