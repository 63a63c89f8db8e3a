"""Folders in Harbor's form become rows, and folders that cannot are refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_folders import write_task

from turnwise.errors import DataError
from turnwise_task_files.rows import task_from_row
from turnwise_workspace_tasks.dockerfile import read_dockerfile
from turnwise_workspace_tasks.graded_task import read_tests, script_command
from turnwise_workspace_tasks.harbor import find_form, read_harbor_task
from turnwise_workspace_tasks.source import FolderSource
from turnwise_workspaces.task_columns import decode_content, encode_content


def test_a_row_has_the_task_without_its_solution(tmp_path):
    """Instruction, files and tests come over; the prompt and the files have nothing of the tests."""
    folder = write_task(tmp_path / "one", {"tests/data.bin": b"\xff\0", "solution/note.txt": "secret"})

    row = read_harbor_task(folder).row()
    task = task_from_row(row)
    tests = read_tests(task.extra, "task")

    assert (task.uid, task.messages[0]["content"]) == ("one", "Write `done` to answer.txt.")
    assert row["files"] == {"hint.txt": "done\n"}
    assert tests.files["/tests/data.bin"] == b"\xff\0"
    assert (tests.command, tests.timeout_s, tests.result) == (("/bin/sh", "/tests/test.sh"), 20.0, "reward")
    assert "secret" not in str(row)


@pytest.mark.parametrize(
    ("text", "network"), [("", ""), ("allow_internet = true", ""), ("allow_internet = false", "none")]
)
def test_a_task_may_forbid_the_network(text, network, tmp_path):
    """Without a word the options of the run decide."""
    folder = write_task(tmp_path / "one", {"task.toml": f"[environment]\n{text}\n"})

    assert read_harbor_task(folder).workspace.network == network


@pytest.mark.parametrize(
    ("files", "without", "text"),
    [
        ({}, "instruction.md", "instruction.md: cannot be read: No such file"),
        ({"instruction.md": " \n"}, "", "instruction.md: is empty"),
        ({}, "tests/test.sh", "tests/test.sh: there is no such file"),
        ({"task.toml": "version = "}, "", "task.toml: "),
        ({"task.toml": "[verifier]\ntimeout_sec = -1"}, "", "verifier.timeout_sec: expected seconds above 0, got -1"),
        ({"task.toml": "verifier = 3"}, "", "verifier: expected a table"),
        ({"task.toml": "[verifier.env]\nKEY = '${SECRET}'"}, "", "no variable of this process"),
        ({"task.toml": "[environment]\ngpus = 1"}, "", "a workspace has no GPU"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "", "steps: is not supported"),
        ({"task.toml": "[environment]\ndocker_image = 3"}, "", "environment.docker_image: expected a text"),
        ({"environment/Dockerfile": "FROM a\nRUN make\n"}, "", "'RUN make' needs an image"),
        ({"environment/Dockerfile": "FROM a\nCOPY gone.txt /x\n"}, "", "there is no 'gone.txt'"),
        ({"environment/docker-compose.yaml": "services: {}"}, "", "is not supported; build an image"),
    ],
)
def test_folders_that_are_refused(files, without, text, tmp_path):
    """Each is one line that names the file."""
    folder = write_task(tmp_path / "one", {"task.toml": "", **files} if "task.toml" in files else files, without)

    with pytest.raises(DataError) as raised:
        read_harbor_task(folder)

    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_links_are_refused(tmp_path):
    """A link could bring any file of this machine into a workspace."""
    folder = write_task(tmp_path / "one")
    (folder / "environment/passwd").symlink_to("/etc/passwd")

    with pytest.raises(DataError, match="expected a regular file"):
        read_harbor_task(folder)


def test_an_image_has_its_files_itself(tmp_path):
    """An image of the path comes before the Dockerfile, and nothing is copied."""
    write_task(tmp_path / "one", {"environment/Dockerfile": "FROM a\nRUN make\n"})

    (row,) = FolderSource("harbor").rows(f"{tmp_path}?image=local/{{name}}")

    assert row["workspace"] == {"image": "local/one", "folders": ["/logs", "/solution", "/tests"]}
    assert row["files"] == {}


DOCKERFILE = """# a comment
FROM python:3.11
WORKDIR /app
ENV A=1 B="two words"
COPY . .
copy src/main.py lib/
COPY --chown=me ["notes.txt", "/etc/notes"]
WORKDIR data
"""


def test_a_dockerfile_without_steps_is_a_file_tree():
    """Working folder, variables and copies come over; a step that needs an image is named."""
    context = {"src/main.py": b"m", "notes.txt": b"n"}

    recipe = read_dockerfile(DOCKERFILE, context)

    assert (recipe.folder, recipe.environment, recipe.run) == ("/app/data", {"A": "1", "B": "two words"}, "")
    assert recipe.files == {
        "/app/src/main.py": b"m",
        "/app/notes.txt": b"n",
        "/app/lib/main.py": b"m",
        "/etc/notes": b"n",
    }
    assert read_dockerfile("RUN a \\\n  b\nRUN c", {}).run == "RUN a    b"
    assert read_dockerfile("COPY --from=x /a /b", context).run == "COPY --from=x /a /b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ARG V=3.11\nFROM python:$V\nARG A\nENV B=x C=${A:-y} D=\\$E\nWORKDIR /${B}/$A", ("/x", "", "xy$E")),
        ("ENV PATH=/opt/bin:$PATH", ("", "ENV PATH=/opt/bin:$PATH", "")),
        ("WORKDIR $HOME/a", ("", "WORKDIR $HOME/a", "")),
        ("ARG A=1\nFROM a\nWORKDIR /$A", ("", "WORKDIR /$A", "")),
        ("ARG A=1\nFROM a\nARG A\nWORKDIR /$A", ("/1", "", "")),
        ("FROM a AS one\nCOPY a /a\nFROM b\n", ("", "FROM b", "")),
        ("FROM a\r\nUSER me\r\nVOLUME /x\r\nHEALTHCHECK CMD true\r\nWORKDIR /b\r\n", ("/b", "", "")),
        ("WORKDIR a\nWORKDIR 'b c'\n", ("/a/b c", "", "")),
    ],
)
def test_variables_and_stages_of_dockerfiles(text, expected):
    """A value that only the image has, and a second stage, need the image; nothing is taken literally."""
    recipe = read_dockerfile(text, {"a": b""})

    values = "".join(value for name, value in recipe.environment.items() if name != "PATH")
    assert (recipe.folder, recipe.run, values) == expected


def test_a_folder_with_files_to_ignore_needs_an_image():
    """Only a builder knows which of them are left out; a file by its name is copied."""
    context = {".dockerignore": b"answers\n", "a": b"a", "answers": b"b"}

    assert read_dockerfile("COPY . /app", context).run == "COPY . /app"
    assert read_dockerfile("COPY a /app/", context).files == {"/app/a": b"a"}


@pytest.mark.parametrize(
    ("dockerfile", "folder"),
    [
        ("FROM a\nARG D=app\nWORKDIR /$D\nRUN make\n", "/app"),
        ("FROM a\nWORKDIR /gone\nFROM b\nRUN make\n", ""),
        ("FROM a\nENV X=$PATH\nCOPY gone /\nWORKDIR /app\n", "/app"),
    ],
)
def test_an_image_of_a_dockerfile_has_its_working_folder(dockerfile, folder, tmp_path):
    """Commands start there, as a container of the image does."""
    write_task(tmp_path / "one", {"environment/Dockerfile": dockerfile})

    assert read_harbor_task(tmp_path / "one", "local/one").workspace.folder == folder


REALISTIC = """
version = "1.0"

[metadata]
author_name = "A"
tags = ["a", "b",
  "c"]
description = \"\"\"
several
lines\"\"\"

[verifier]
timeout_sec = 900.0
env = { MODE = "strict" }

[agent]
timeout_sec = 1_800.0

[environment]
build_timeout_sec = 600.0
cpus = 2
memory_mb = 2048
storage_mb = 10240
allow_internet = false
workdir = "/srv/app"
"""


def test_a_task_of_a_stranger(tmp_path):
    """Keys that a workspace has no use for are left, and all other ones count."""
    files = {
        "task.toml": REALISTIC,
        "environment/Dockerfile": "ARG P=/opt\nFROM python\nARG P\nENV P2=$P\nUSER me\nCOPY a.py b.py ${P2}/lib/\n",
        "environment/a.py": "a",
        "environment/b.py": "b",
        "tests/test.sh": "#!/usr/bin/env -S bash -e\npytest --ctrf /logs/verifier/ctrf.json /tests\n",
        "README.md": "more",
    }
    task = read_harbor_task(write_task(tmp_path / "one", files))

    assert task.files == {"/opt/lib/a.py": b"a", "/opt/lib/b.py": b"b"}
    assert (task.workspace.folder, task.workspace.network, task.time_s) == ("/srv/app", "none", 1800.0)
    assert (task.tests.timeout_s, task.tests.environment, task.tests.result) == (900.0, {"MODE": "strict"}, "ctrf")


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("echo 1 > /logs/verifier/reward.txt # and ctrf.json", "reward"),
        ("pytest --ctrf /logs/verifier/ctrf.json", "ctrf"),
        ("pytest --junitxml=/logs/verifier/junit.xml", "junit"),
        ("exit 0", "exit_code"),
    ],
)
def test_the_form_of_results_is_in_the_test_files(text, form):
    """It is not left to what is there afterwards."""
    assert find_form({"/tests/test.sh": text.encode()}) == form


def test_scripts_run_by_their_first_line():
    """No execute bit is needed."""
    assert script_command("/t.sh", b"#!/usr/bin/env bash\n") == ("/usr/bin/env", "bash", "/t.sh")
    assert script_command("/t.sh", b"exit 0") == ("/bin/sh", "/t.sh")


@given(st.binary())
def test_any_content_comes_back(data):
    """Contents of files pass through JSON unchanged."""
    assert decode_content(encode_content(data)) == data
