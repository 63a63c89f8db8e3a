"""Reads the results that tests write. The agent's code may have written them: nothing in them is trusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree

from attrs import frozen

from turnwise_workspace_tasks.graded_task import ResultForm

MAX_RESULT_BYTES: Final = 4 * 2**20
_MAIN: Final = "reward"
_MAX_NUMBERS: Final = 32
_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_HEADER: Final = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_PASSED: Final = re.compile(r"^PASSED (\S.*)$|^XFAIL (\S.*?)(?: - .*)?$", re.MULTILINE)
_NOT_PASSED: Final = re.compile(
    r"^(?:FAILED|ERROR|XPASS|SUBFAIL(?:ED)?(?:\[.{0,200}?\])?(?: \(.{0,200}?\))?)"
    r" ((?! )(?:(?! - )[^[\n])+(?:\[.*?\](?= - |$))?)",
    re.MULTILINE,
)
_OF_PYTEST: Final = re.compile(r"::|\.py$")
"""In each name that pytest prints: of a test, or of a file that cannot be collected."""
_FAILED: Final = frozenset({"failure", "error"})


class ResultError(Exception):
    """A result has another form than it should."""


@frozen(kw_only=True)
class Results:
    """
    The results of tests.

    Attributes:
        value: number of a reward file; None for results by test.
        passed: whether a test passed, by its name; tests that were skipped are not among them.
        numbers: all numbers of a reward file by name.
    """

    value: float | None = None
    passed: Mapping[str, bool] = {}
    numbers: Mapping[str, float] = {}

    def score(self, must_pass: Sequence[str], *, fraction: bool) -> float:
        """
        Return the number of the reward file, or the score by test.

        Args:
            must_pass: names of the tests that count; one that did not run has failed. Empty for all that ran.
            fraction: return the part that passed, and not 1 only if all did.
        """
        if self.value is not None:
            return self.value
        counted = [self.passed.get(name, False) for name in must_pass] or list(self.passed.values())
        if not counted:
            return 0.0
        return sum(counted) / len(counted) if fraction else float(all(counted))


def read_result(form: ResultForm, name: str, data: bytes) -> Results:
    """Return the results in a file; `ResultError` for one that is damaged."""
    try:
        if form == "ctrf":
            return _read_ctrf(json.loads(data))
        if form == "junit":
            return _read_junit(data)
        if form == "pytest":
            return _read_summary(data)
        return _read_numbers(json.loads(data)) if name.endswith(".json") else _read_number(data)
    # A number may be too large, and a report may name an encoding that does not exist.
    except (ValueError, OverflowError, LookupError, RecursionError, ElementTree.ParseError) as error:
        raise ResultError(f"{name}: {' '.join(str(error).split())}") from error


def _read_number(data: bytes) -> Results:
    value = float(data.decode(errors="replace").strip())
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return Results(value=value, numbers={_MAIN: value})


def _read_numbers(found: object) -> Results:
    if isinstance(found, Mapping):
        numbers = {str(name): float(value) for name, value in found.items() if _is_number(value)}
        numbers = {name: value for name, value in numbers.items() if _NAME.fullmatch(name)}
        if len(numbers) > _MAX_NUMBERS:
            raise ValueError(f"has more than {_MAX_NUMBERS} numbers")
        if _MAIN in numbers or len(numbers) == 1:
            return Results(value=numbers.get(_MAIN, next(iter(numbers.values()))), numbers=numbers)
    raise ValueError(f"expected an object with the number 'reward', or with one number, got {found!r:.100}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_ctrf(found: Any) -> Results:
    try:
        tests = [(str(each["name"]), each["status"]) for each in found["results"]["tests"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"expected a CTRF report with results.tests, got {found!r:.100}") from error
    return Results(passed=_merge([(name, status == "passed") for name, status in tests if status != "skipped"]))


def _read_summary(data: bytes) -> Results:
    text = _COLOURS.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
    # A program under test prints before the summary, and can imitate it, so only failures count there.
    *_, last = _HEADER.split(text)
    before = text[: len(text) - len(last)]
    failed = [*_NOT_PASSED.findall(last), *(name for name in _NOT_PASSED.findall(before) if _OF_PYTEST.search(name))]
    passed = ["".join(names) for names in _PASSED.findall(last)]
    if not failed and not passed:
        raise ValueError("has no line of a summary; run pytest with -rA")
    return Results(passed=_merge([*((name, False) for name in failed), *((name, True) for name in passed)]))


def _read_junit(data: bytes) -> Results:
    # A report has no use for them, and entities can be made to grow without bound.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
        raise ValueError("has a document type or another encoding than UTF-8")
    found = []
    for case in ElementTree.fromstring(data).iter("testcase"):
        inside = {child.tag for child in case}
        # A skipped test may still fail in the teardown of its fixtures.
        if "skipped" not in inside or inside & _FAILED:
            names = [case.get("classname", ""), case.get("name", "")]
            found.append((".".join(filter(None, names)), not inside & _FAILED))
    return Results(passed=_merge(found))


def _merge(cases: Sequence[tuple[str, bool]]) -> dict[str, bool]:
    """Return the results by name; of two with one name, both must have passed."""
    merged: dict[str, bool] = {}
    for name, passed in cases:
        merged[name] = merged.get(name, True) and passed
    return merged
