"""Folders in Terminal-Bench's form."""

from __future__ import annotations

import pytest
from boxes import why_no_boxes
from graded_boxes import grade_task, shell

from turnwise.cli import main
from turnwise.errors import DataError
from turnwise_testing import TaskSourceExample, TaskSourceSuite
from turnwise_workspace_tasks.terminal_bench import read_terminal_bench_task

FILES = {
    "task.yaml": "instruction: |-\n  Write done to answer.txt.\nparser_name: pytest\nmax_test_timeout_sec: 20\n",
    "Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY hint.txt ./\n",
    "docker-compose.yaml": "services: {client: {build: {dockerfile: Dockerfile}}}\n",
    "hint.txt": "done\n",
    "solution.sh": "cp hint.txt answer.txt\n",
    "run-tests.sh": "#!/bin/sh\nsh $TEST_DIR/test_outputs.sh\n",
    "tests/test_outputs.sh": "ok=FAILED; grep -qx done /app/answer.txt && ok=PASSED\n"
    'echo "===== short test summary info ====="; echo "PASSED t.py::test_a"; echo "$ok t.py::test_b"\n',
}


def write(folder, **changes):
    """Write the task, with changed files."""
    for path, text in {**FILES, **changes}.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


class TestTerminalBenchSource(TaskSourceSuite):
    """One task, and a folder without one."""

    entry_point = "workspace_tasks"
    module = "turnwise_workspace_tasks"
    registered = "terminal_bench"

    @pytest.fixture
    def examples(self, tmp_path):
        """The folder of the task and the one around it are the same data set."""
        write(tmp_path / "tasks/one")
        (tmp_path / "none").mkdir()
        return (
            TaskSourceExample(text=str(tmp_path / "tasks"), num_rows=1),
            TaskSourceExample(text=str(tmp_path / "none"), error="no folder in it has a file task.yaml"),
        )


def test_a_row_has_nothing_of_tests_and_solution(tmp_path):
    """The context of the Dockerfile leaves them out, also when it copies everything."""
    task = read_terminal_bench_task(write(tmp_path / "one", Dockerfile="FROM a\nWORKDIR /app\nCOPY . .\n"))

    assert task.files == {"/app/hint.txt": b"done\n"}
    assert (task.instruction, task.workspace.folder) == ("Write done to answer.txt.", "/app")
    assert (task.tests.timeout_s, task.time_s, task.tests.result) == (20.0, 360.0, "pytest")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"task.yaml": "parser_name: pytest\n"}, "instruction: expected a text"),
        ({"task.yaml": "instruction: a\nparser_name: swebench\n"}, "only pytest is supported"),
        ({"task.yaml": "instruction: [\n"}, "task.yaml"),
        ({"Dockerfile": "FROM a\nRUN apt-get update\n"}, "needs an image"),
    ],
)
def test_folders_that_are_refused(changes, text, tmp_path):
    """Each is one line."""
    with pytest.raises(DataError, match=text) as raised:
        read_terminal_bench_task(write(tmp_path / "one", **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize(("answer", "value"), [("done", 1.0), ("wrong", 0.0)])
def test_each_line_of_the_summary_must_pass(answer, value, tmp_path):
    """The tests are counted by their lines."""
    found = grade_task(read_terminal_bench_task(write(tmp_path / "one")), shell(f"echo {answer} > answer.txt"))

    assert (found.value, found.metrics["tests_passed"]) == (value, 1.0 + value), found


PRINTED = "PASSED t.py::test_a\\nPASSED t.py::test_b\\nPASSED t.py::test_c\\n"


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize("num_bytes", [0, 5 * 2**20])
def test_a_program_under_test_cannot_print_results(num_bytes, tmp_path):
    """Neither lines as those of the summary, nor so much that the summary is cut off."""
    summary = FILES["tests/test_outputs.sh"].partition("\n")[2]
    tests = f"ok=FAILED; sh /app/answer.txt\n{summary}"
    task = read_terminal_bench_task(write(tmp_path / "one", **{"tests/test_outputs.sh": tests}))
    work = f"printf '{PRINTED}' > printed; echo 'cat printed; head -c {num_bytes} /dev/zero' > answer.txt"

    found = grade_task(task, shell(work))

    assert found.value == 0.0, found
    assert found.metrics.get("tests_passed", 1.0) == 1.0
    assert ("has more than 4 MiB" in found.problem) == bool(num_bytes)


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
def test_the_command_checks_them(tmp_path, capsys):
    """With the name of the form."""
    write(tmp_path / "one")

    assert main(["check", "tasks", str(tmp_path), "--form", "terminal_bench"]) == 0, capsys.readouterr().out
