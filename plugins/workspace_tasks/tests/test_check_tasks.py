"""`turnwise check tasks` tells good tasks from broken ones."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
from boxes import why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers
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
        (["EXAMPLES", "--build", "true"], "add an option such as ?image=local/{name}"),
        (["ROWS", "--form", "swe", "--build", "true"], "--build needs a form with Dockerfiles"),
        (
            ["BUILT?image=local/{name}", "--backend", "containers", "--build", "/nowhere/podman build"],
            "--build: '/nowhere/podman build'",
        ),
    ],
)
def test_bad_words_are_one_line(words, text, tmp_path, capsys):
    """Nothing starts."""
    places = {"EMPTY": str(tmp_path), "EXAMPLES": str(EXAMPLES), "ROWS": str(tmp_path / "rows.jsonl")}
    if words[:1] == ["ROWS"]:
        (tmp_path / "rows.jsonl").write_text("")
    if words and words[0].startswith("BUILT"):
        write_task(tmp_path / "tasks/one", {"environment/Dockerfile": "FROM a\nRUN b\n"})
        words = [words[0].replace("BUILT", str(tmp_path / "tasks")), *words[1:]]

    assert main(["check", "tasks", *(places.get(each, each) for each in words)]) == 2

    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_images_are_built_from_dockerfiles(tmp_path, capsys):
    """Their steps run, commands start in their working folder, and a Dockerfile that fails breaks its task alone."""
    if reason := why_no_containers():
        pytest.skip(reason)
    steps = f"FROM {IMAGE}\nWORKDIR /app\nCOPY hint.txt ./\nRUN tr a-z A-Z < hint.txt > made\n"
    tests = '#!/bin/sh\n[ $PWD = /app ] && [ "$(cat answer.txt)" = DONE ] && x=1\n'
    files = {
        "environment/Dockerfile": steps,
        "solution/solve.sh": "cp made answer.txt\n",
        "tests/test.sh": f"{tests}echo ${{x:-0}} > /logs/verifier/reward.txt\n",
    }
    write_task(tmp_path / "good", files)
    write_task(tmp_path / "bad", {**files, "environment/Dockerfile": f"{steps}RUN exit 3\n"})
    options = {"command": ENGINE, "run_options": RUN_OPTIONS, "disk": "none"}
    build = shlex.join([*ENGINE, "build", "--network", "none", *RUN_OPTIONS])
    place = f"{tmp_path}?image=localhost/turnwise-built/{{name}}"
    words = ["--backend", "containers", "--options", json.dumps(options), "--build", build, "--at-once", "2"]

    try:
        code = main(["check", "tasks", place, *words])
    finally:
        subprocess.run([*ENGINE, "rmi", "-f", "localhost/turnwise-built/good"], capture_output=True, check=False)

    printed = capsys.readouterr().out
    assert code == 1
    assert "built localhost/turnwise-built/good" in printed
    assert "good: good, " in printed
    assert "bad: its image cannot be built: " in printed
