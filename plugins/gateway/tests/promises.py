"""
Runs the tests of the table of promises, and says for each promise whether its tests have passed.

    python plugins/gateway/tests/promises.py                # runs them
    python plugins/gateway/tests/promises.py REPORT ...     # reads reports that `pytest --junit-xml` has written

A promise is shown if each of its tests has passed at least once and failed in no case. Tests that are marked † run a
client that `make gateway-clients` installs. Without the client they may be skipped, if another test of the promise has
passed. The exit code is 1 if a promise is not shown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
TABLE = FOLDER / "PROMISES.md"


class NamedTest(NamedTuple):
    """A test in the table: its file from the root, its function, and whether it needs a client."""

    path: str
    name: str
    needs_client: bool


class Promise(NamedTuple):
    """A row of the table."""

    number: int
    text: str
    tests: tuple[NamedTest, ...]


def read_promises(table: str) -> list[Promise]:
    """Return the promises of a table in Markdown."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].isdecimal():
            found.append(Promise(int(cells[1]), cells[2], read_tests(cells[3])))
    return found


def read_tests(text: str) -> tuple[NamedTest, ...]:
    """Return the tests that a text names."""
    folder = FOLDER.relative_to(ROOT).as_posix()
    return tuple(
        NamedTest(path[1:] if path.startswith("/") else f"{folder}/{path}", name, bool(mark))
        for path, name, mark in re.findall(r"`([\w./]+\.py)::(\w+)`( †)?", text)
    )


Outcomes = Mapping[tuple[str, str], Sequence[str]]
"""The outcomes of a test's cases, such as `passed`, by the module and the name of the test."""


def read_reports(reports: Iterable[Path]) -> Outcomes:
    """Return the outcomes of each test; of a case in several reports, such as a repeated one, the last counts."""
    cases: dict[tuple[str, str], str] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
            cases[case.get("classname", ""), case.get("name", "")] = outcome
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (module, name), outcome in cases.items():
        found[module, name.partition("[")[0]].append(outcome)
    return found


def judge(promise: Promise, outcomes: Outcomes) -> list[str]:
    """Return the reasons for which a promise is not shown; empty if it is shown."""
    complaints, num_passed = [], 0
    for test in promise.tests:
        seen = outcomes.get((test.path.removesuffix(".py").replace("/", "."), test.name), ())
        num_passed += "passed" in seen and "failed" not in seen
        if "failed" in seen:
            complaints.append(f"{test.path}::{test.name} failed")
        elif "passed" not in seen and not test.needs_client:
            complaints.append(f"{test.path}::{test.name} {'was skipped' if seen else 'did not run'}")
    return complaints if num_passed else [*complaints, "no test of it has passed"]


def run_tests(tests: Sequence[NamedTest], report: Path) -> None:
    """Run tests, and write their report."""
    # pytest would run nothing if one of them did not exist.
    names = sorted({f"{test.path}::{test.name}" for test in tests if (ROOT / test.path).is_file()})
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *names], cwd=ROOT, check=False)


def main(reports: Sequence[str]) -> int:
    """Judge every promise by reports, or by a run of its tests."""
    promises = read_promises(TABLE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(each) for each in reports] or [Path(folder) / "report.xml"]
        if not reports:
            run_tests([test for promise in promises for test in promise.tests], paths[0])
        outcomes = read_reports(paths)
    num_shown = 0
    for promise in promises:
        complaints = judge(promise, outcomes)
        num_shown += not complaints
        for complaint in complaints:
            print(f"promise {promise.number} is not shown: {complaint}")
    print(f"{num_shown} of {len(promises)} promises of the gateway are shown by tests that have passed")
    return 0 if num_shown == len(promises) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
