"""`turnwise check tasks` tells good tasks from broken ones."""

from __future__ import annotations

import pytest
from boxes import why_no_boxes
from task_folders import EXAMPLES, PASS, write_task

from turnwise.cli import main

needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables and lines are not broken."""
    monkeypatch.setenv("COLUMNS", "300")


@needs_boxes
def test_good_and_broken_tasks(tmp_path, capsys):
    """Each broken task has a line that says why, and the exit code is 1."""
    write_task(tmp_path / "good")
    write_task(tmp_path / "unsolved", {"solution/solve.sh": "echo almost > answer.txt\n"})
    write_task(tmp_path / "failing", {"solution/solve.sh": "echo done > answer.txt; echo oh no; exit 7\n"})
    write_task(tmp_path / "free", {"tests/test.sh": PASS.replace("echo 0", "echo 1")})
    write_task(tmp_path / "bare", without="solution/solve.sh")
    write_task(tmp_path / "silent", {"tests/test.sh": PASS.replace("|| echo 0", "|| echo zero")})

    code = main(["check", "tasks", str(tmp_path), "--at-once", "3"])

    printed = capsys.readouterr().out
    assert code == 1
    for text in (
        "good: good, ",
        "unsolved: the solution has reward 0",
        "failing: the solution ended with exit code 7: oh no",
        "free: doing nothing has reward 1",
        "bare: it has no solution",
        "silent: /logs/verifier/reward.txt: could not convert",
        "1 of 6 tasks are good",
    ):
        assert text in printed, printed
    assert printed.count("[6 of 6]") == 1


@needs_boxes
@pytest.mark.slow
def test_the_examples_are_good(capsys):
    """Every example has reward 1 with its solution, and 0 when nothing is done."""
    assert main(["check", "tasks", str(EXAMPLES), "--at-once", "2"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "needs a folder with tasks"),
        (["/nowhere"], "/nowhere: cannot be read: No such file or directory"),
        (["EMPTY"], "no folder in it has a file task.toml"),
        (["EMPTY", "--form", "harbour"], "there is no form 'harbour'"),
        (["EMPTY", "--at-once", "0"], "--at-once must be at least 1"),
        (["EMPTY", "--options", "[]"], "--options: expected an object"),
        (["EXAMPLES", "--backend", "bubblewrp"], "did you mean 'bubblewrap'"),
        (["EXAMPLES", "--options", '{"sise": 1}'], "sise"),
        (["EXAMPLES", "--backend", "containers"], "needs one"),
    ],
)
def test_bad_words_are_one_line(words, text, tmp_path, capsys):
    """Nothing starts."""
    places = {"EMPTY": str(tmp_path), "EXAMPLES": str(EXAMPLES)}

    assert main(["check", "tasks", *(places.get(each, each) for each in words)]) == 2

    assert text in capsys.readouterr().err
