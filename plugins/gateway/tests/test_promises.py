"""The table of promises names tests that exist, and a promise counts as shown only when its tests have passed."""

from __future__ import annotations

import ast
from pathlib import Path

import promises
import pytest
from promises import NamedTest, Promise

ALL = promises.read_promises(promises.TABLE.read_text(encoding="utf-8"))
NAMED = sorted({(test.path, test.name) for promise in ALL for test in promise.tests})


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_test_exists(path: str, name: str) -> None:
    """Each test in the table is a function of its file."""
    tree = ast.parse((promises.ROOT / path).read_text(encoding="utf-8"))

    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_has_a_row() -> None:
    """The rows are numbered without a gap, each names a test that needs no client, and the table names nothing else."""
    text = promises.TABLE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "::" in line]

    assert list(range(1, 52)) == [promise.number for promise in ALL]
    assert len(rows) == len(ALL)
    assert [] == [promise.number for promise in ALL if all(test.needs_client for test in promise.tests)]
    assert sum(row.count("::") for row in rows) == sum(len(promise.tests) for promise in ALL)
    assert "†" in text


PROMISE = Promise(
    1, "It holds.", (NamedTest("a/test_a.py", "test_it", False), NamedTest("a/test_b.py", "test_cli", True))
)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ({"test_it[1]": "passed", "test_it[2]": "passed", "test_cli": "passed"}, []),
        ({"test_it[1]": "passed", "test_it[2]": "skipped", "test_cli": "skipped"}, []),
        ({"test_it": "passed"}, []),
        ({"test_it": "skipped", "test_cli": "passed"}, ["a/test_a.py::test_it was skipped"]),
        ({"test_cli": "passed"}, ["a/test_a.py::test_it did not run"]),
        ({"test_it[1]": "passed", "test_it[2]": "failed"}, ["a/test_a.py::test_it failed", "no test of it has passed"]),
        ({"test_it": "error", "test_cli": "passed"}, ["a/test_a.py::test_it failed"]),
        ({"test_it": "passed", "test_cli": "failed"}, ["a/test_b.py::test_cli failed"]),
        ({}, ["a/test_a.py::test_it did not run", "no test of it has passed"]),
    ],
)
def test_a_promise_is_shown_by_tests_that_passed(tmp_path: Path, cases: dict[str, str], expected: list[str]) -> None:
    """A test that failed, was skipped or did not run is named; one that needs a client may be skipped."""
    assert expected == promises.judge(PROMISE, promises.read_reports([write_report(tmp_path / "report.xml", cases)]))


def test_a_repeated_test_counts_as_it_ended(tmp_path: Path) -> None:
    """A later report replaces the outcome of each case that it has, and of no other."""
    first = write_report(tmp_path / "1.xml", {"test_it[1]": "failed", "test_it[2]": "passed"})
    second = write_report(tmp_path / "2.xml", {"test_it[1]": "passed"})

    assert [] == promises.judge(PROMISE, promises.read_reports([first, second]))
    assert [] != promises.judge(PROMISE, promises.read_reports([second, first]))


def test_the_command_reads_what_pytest_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """It runs the tests of the table, and names a promise whose test was skipped."""
    table = tmp_path / "PROMISES.md"
    named = "`tests/test_promises.py::test_a_repeated_test_counts_as_it_ended`"
    table.write_text(f"| 1 | It holds. | {named} | |\n| 2 | It would. | `tests/test_gone.py::test_gone` | |\n")
    monkeypatch.setattr(promises, "TABLE", table)

    assert 1 == promises.main([])
    out = capsys.readouterr().out
    assert "promise 1" not in out
    assert "promise 2 is not shown: plugins/gateway/tests/test_gone.py::test_gone did not run\n" in out
    assert "1 of 2 promises of the gateway are shown" in out


def write_report(path: Path, cases: dict[str, str]) -> Path:
    """Write a report as pytest does."""
    inner = {"passed": "", "skipped": "<skipped/>", "failed": "<failure/>", "error": "<error/>"}
    modules = {"test_cli": "a.test_b"}
    rows = [
        f'<testcase classname="{modules.get(name, "a.test_a")}" name="{name}">{inner[outcome]}</testcase>'
        for name, outcome in cases.items()
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>", encoding="utf-8")
    return path
