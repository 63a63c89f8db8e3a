"""Rows in SWE-bench's form."""

from __future__ import annotations

import json
import subprocess

import pytest
from boxes import why_no_boxes
from graded_boxes import grade_task, shell

from turnwise.errors import DataError
from turnwise_testing import TaskSourceExample, TaskSourceSuite
from turnwise_workspace_tasks.swe import SweSource

PATCH = "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
TEST_PATCH = """--- a/test_sums.py
+++ b/test_sums.py
@@ -1,2 +1,3 @@
 from sums import add
-print("PASSED" if add(1, 0) == 1 else "FAILED", "t.py::old")
+print("PASSED" if add(1, 0) == 1 else "FAILED", "t.py::old")
+print("PASSED" if add(1, 2) == 3 else "FAILED", "t.py::new")
"""
FILES = {
    "sums.py": "def add(a, b):\n    return a - b\n",
    "test_sums.py": 'from sums import add\nprint("PASSED" if add(1, 0) == 1 else "FAILED", "t.py::old")\n',
}
ROW = {
    "instance_id": "me__sums-1",
    "repo": "me/sums",
    "base_commit": "HEAD",
    "problem_statement": "add subtracts",
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["t.py::new"]',
    "PASS_TO_PASS": ["t.py::old"],
}


def write(folder, *, is_git=True, **changes):
    """Write the repository and the rows, and return the text of the source."""
    place = folder / "repositories/me__sums"
    place.mkdir(parents=True)
    for name, text in FILES.items():
        (place / name).write_text(text)
    if is_git:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
            subprocess.run(["git", *words], cwd=place, check=True)
        (place / "sums.py").write_text("changed since\n")
    (folder / "rows.jsonl").write_text(json.dumps({**ROW, **changes}) + "\n")
    return f"{folder}/rows.jsonl?repositories={folder}/repositories&command=python3 test_sums.py"


class TestSweSource(TaskSourceSuite):
    """One row, and a file that is missing."""

    entry_point = "workspace_tasks"
    module = "turnwise_workspace_tasks"
    registered = "swe"

    @pytest.fixture
    def examples(self, tmp_path):
        """A git repository."""
        return (
            TaskSourceExample(text=write(tmp_path), num_rows=1),
            TaskSourceExample(text="/nowhere.jsonl", error="there is no such file"),
        )


@pytest.mark.parametrize("is_git", [True, False])
def test_a_row_has_the_commit_and_hides_the_patches(is_git, tmp_path):
    """The files are those of the commit; the tests are those of the patch."""
    (task,) = SweSource().tasks(write(tmp_path, is_git=is_git))

    assert {name: data.decode() for name, data in task.files.items()} == FILES
    assert list(task.tests.files) == ["test_sums.py"]
    assert b"t.py::new" in task.tests.files["test_sums.py"]
    assert task.tests.must_pass == ("t.py::new", "t.py::old")
    assert "a + b" not in str(task.row())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repo": "me/other"}, "me__other: there is no such folder"),
        ({"base_commit": "abc123"}, "not a valid object name"),
        ({"base_commit": "--output=/tmp/x"}, "is no commit"),
        ({"test_patch": PATCH.replace("a - b", "a * b")}, "test_patch: cannot be applied"),
        ({"FAIL_TO_PASS": "[", "PASS_TO_PASS": []}, "FAIL_TO_PASS: expected a list"),
        ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": None}, "name no test"),
        ({"problem_statement": ""}, "problem_statement: expected a text"),
    ],
)
def test_rows_that_are_refused(changes, text, tmp_path):
    """Each is one line that names the row."""
    with pytest.raises(DataError, match=text) as raised:
        list(SweSource().rows(write(tmp_path, **changes)))
    assert str(raised.value).startswith(f"{tmp_path}/rows.jsonl")
    assert "\n" not in str(raised.value)


OLD = 'import sums, conftest\nprint("PASSED" if sums.add(1, 0) == 1 else "FAILED", "tests/old.py::old")\n'


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize(
    ("work", "value"),
    [
        ("true", 1.0),
        ("sed -i 's/a - b/0/' sums.py", 0.0),
        ("sed -i 's/a - b/0/' sums.py; echo 'print(\"PASSED tests/old.py::old\")' > tests/old.py", 0.0),
        ("sed -i 's/a - b/0/' sums.py; echo 'import sums; sums.add = lambda a, b: 1' > tests/conftest.py", 0.0),
    ],
)
def test_test_files_that_no_patch_changes_are_restored(work, value, tmp_path):
    """Those of the named tests and `conftest.py`: an agent could edit the tests that must stay passing."""
    changes = {"test_patch": "", "FAIL_TO_PASS": None, "PASS_TO_PASS": ["tests/old.py::old"]}
    text = write(tmp_path, is_git=False, **changes).replace("python3 test_sums.py", "PYTHONPATH=. python3 tests/old.py")
    for path, content in {"tests/old.py": OLD, "tests/conftest.py": "", "tests/other.py": ""}.items():
        place = tmp_path / "repositories/me__sums" / path
        place.parent.mkdir(exist_ok=True)
        place.write_text(content)
    (task,) = SweSource().tasks(text)

    assert sorted(task.tests.files) == ["tests/conftest.py", "tests/old.py"]
    assert grade_task(task, shell(work)).value == value


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["t.py::a[x - y]", "t.py::b[a b]"], ("t.py::a[x - y]", "t.py::b[a b]", "t.py::old")),
        ('["t.py::a[\\"q\\"]"]', ('t.py::a["q"]', "t.py::old")),
        (None, ("t.py::old",)),
    ],
)
def test_names_of_tests(names, expected, tmp_path):
    """Lists, JSON texts, with parameters, and none."""
    (task,) = SweSource().tasks(write(tmp_path, FAIL_TO_PASS=names))

    assert task.tests.must_pass == expected


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize(
    ("work", "value"),
    [
        ("sed -i 's/a - b/a + b/' sums.py", 1.0),
        ("true", 0.0),
        ("echo 'print(\"PASSED t.py::new\\nPASSED t.py::old\")' > test_sums.py", 0.0),
        ("rm test_sums.py; mkdir test_sums.py", 0.0),
        ("sed -i 's/a - b/a if b == 0 else 3/' sums.py; rm test_sums.py", 1.0),
    ],
)
def test_named_tests_decide(work, value, tmp_path):
    """The test files of the row replace the agent's."""
    (task,) = SweSource().tasks(write(tmp_path))

    assert grade_task(task, shell(work)).value == value
