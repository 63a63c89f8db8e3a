"""What people see of a graded episode: the commands, the changed files, and the report of the tests."""

from __future__ import annotations

import pytest
from agent_runs import call, roll_out, run_cli, write_run
from boxes import why_no_boxes
from graded_boxes import report_changes, shell
from task_folders import write_task

from turnwise_result_files import read_results
from turnwise_workspace_tasks.grading import Grade
from turnwise_workspace_tasks.results import Results

needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
JUNIT = """#!/bin/sh
cd /logs/verifier
echo '<testsuite><testcase name="good"/><testcase name="bad"><failure/></testcase></testsuite>' > junit.xml
seq 10000; echo the end; exit 3
"""


@pytest.mark.slow
@needs_boxes
def test_a_result_has_the_reports(tmp_path):
    """In the file, and in what `turnwise show` prints: commands, changes, and the end of the tests' output."""
    write_task(tmp_path / "tasks" / "first", {"tests/test.sh": JUNIT})
    turns = (call("shell", command="echo done > answer.txt; cat missing"), "Done.")
    write_run(tmp_path, turns, {}, data={"path": "harbor:tasks"}, reward="workspace_tests")

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    (episode,) = read_results(tmp_path / "out")
    command, changes, tests = episode.reports
    assert (command.title, command.failed, command.num_turns) == ("echo done > answer.txt; cat missing", True, 1)
    assert (command.facts["exit code"], "No such file" in command.text) == ("1", True)
    assert command.facts["seconds"] > 0
    assert (changes.title, changes.facts) == ("changed files", {"files": 1.0})
    assert "--- /dev/null\n+++ answer.txt\n@@ -0,0 +1 @@\n+done" == changes.text
    assert tests.failed
    assert {"reward": 0.0, "passed": 1.0, "failed": 1.0, "exit code": "3"}.items() <= tests.facts.items()
    assert tests.text.startswith("failed: bad\n")
    assert tests.text.endswith("10000\nthe end\n")
    shown = run_cli(tmp_path, "show", "out", "0", "--no-color").stdout
    for text in (
        "── echo done > answer.txt; cat missing, exit code 1",
        "+++ answer.txt",
        "── tests, reward 0",
        "the end",
    ):
        assert text in shown


@needs_boxes
def test_changes(tmp_path):
    """New, changed, removed, binary, large and many files; names and links of an agent do no harm."""
    files = {"kept": "same\n", "text": "one\ntwo\n", "gone": "x\n", "binary": "text\n"}
    work = r"""
    printf 'one\n2\n' > text; rm gone; printf '\377\376' > binary; truncate -s 1T huge; ln -s /etc/passwd link
    mkfifo pipe; touch "$(printf 'a\nb')"; mkdir deep; echo new > "deep/ file"
    """

    report = report_changes(shell(work), files)

    assert report.facts == {"files": 4.0}
    parts = ["--- text\n+++ text\n@@ -1,2 +1,2 @@\n one\n-two\n+2", "--- gone\n+++ /dev/null", "+++ deep/ file\n"]
    for part in (*parts, "binary: 5 bytes became 2 bytes"):
        assert part in report.text
    for name in ("kept", "huge", "link", "pipe", "passwd"):
        assert name not in report.text


@needs_boxes
def test_many_changes_are_named(tmp_path):
    """The first are shown, and the others counted."""
    report = report_changes(shell("for n in $(seq 100 149); do echo $n > f$n; done"), {})

    assert report.facts == {"files": 50.0}
    assert "+++ f119" in report.text
    assert "+++ f120" not in report.text
    assert "30 files more: f120, f121" in report.text


@needs_boxes
def test_programs_of_the_agent_list_nothing(tmp_path):
    """A fake `find` in the working folder, and one in PATH, are not asked."""
    report = report_changes(
        shell("echo 'echo no' > find; chmod +x find"), {}, environment={"PATH": "/workspace:/usr/bin:/bin"}
    )

    assert "+++ find" in report.text


def test_a_report_names_the_problem():
    """And the tests that failed, of many the first ones; a limit of 0 keeps no output."""
    passed = {f"test_{number}": False for number in range(150)}
    report = Grade(results=Results(passed=passed), problem="the tests took too long", output="x" * 50).report(0)

    assert report.text.startswith("the tests took too long\nfailed: test_0\n")
    assert report.text.endswith("failed: … 50 tests more")
    assert (report.failed, report.facts["exit code"]) == (True, "none")
