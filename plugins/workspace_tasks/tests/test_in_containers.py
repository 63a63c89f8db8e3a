"""Tasks are graded in containers as in boxes."""

from __future__ import annotations

import pytest
from graded_boxes import grade_task, shell
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, why_no_containers
from task_folders import write_task

from turnwise.config.parts import Choice
from turnwise_workspace_tasks.harbor import read_harbor_task

pytestmark = pytest.mark.slow
BACKEND = {"command": list(ENGINE), "run_options": list(RUN_OPTIONS)}


@pytest.fixture(autouse=True)
def engine():
    """Skip where no container runs."""
    if reason := why_no_containers():
        pytest.skip(reason)


@pytest.mark.parametrize("disk", ["tmpfs", "none"])
@pytest.mark.parametrize(
    ("work", "value"),
    [
        ("cp hint.txt answer.txt", 1.0),
        ("true", 0.0),
        ("echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 500 /tests", 0.0),
        (
            "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; ln -s /dev/null /logs/verifier/reward.txt",
            0.0,
        ),
        ("rm -rf /logs/verifier; ln -s /workspace /logs/verifier; echo 1 > reward.txt", 0.0),
        (
            "(unshare -Urpf sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done')"
            " > /dev/null 2>&1 & sleep 0.5",
            0.0,
        ),
        ("cd /tests; seq 1 30000 | sed 's/^/" + "a" * 100 + "/' | xargs touch; echo done > /workspace/answer.txt", 1.0),
        ("(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &", 0.0),
    ],
)
def test_grades_and_attacks(disk, work, value, tmp_path):
    """Also with a root file system that the agent can write, and nothing is left."""
    task = read_harbor_task(write_task(tmp_path / "one"))
    backend = Choice("containers", {**BACKEND, "disk": disk})

    found = grade_task(task, shell(work), backend=backend, image=IMAGE, boot_s=60.0, close_s=60.0)

    assert found.value == value, found
    assert list_containers() == []


SEPARATE = "su -s /bin/sh answer"
"""Runs a shell as another user, which the image has."""
HIDE = "chmod 700 /tests /logs"
TEST = """#!/bin/sh
{first}
echo 0 > /logs/verifier/reward.txt
chmod 644 /logs/verifier/reward.txt
[ "$({how} /workspace/answer.sh)" = "$(cat /tests/secret.txt)" ] && echo 1 > /logs/verifier/reward.txt
"""
PROGRAMS = {
    "reads the answer": "cat /tests/secret.txt",
    "edits the answer": "echo mine > /tests/secret.txt; echo mine",
    "edits the tests that run": "echo 'echo 1 > /logs/verifier/reward.txt' >> /tests/test.sh",
    "writes the result later": """
        (setsid sh -c 'cd /logs/verifier; while :; do echo 1 > new; mv new reward.txt; done') > /dev/null 2>&1 &
        while [ "$(cat /logs/verifier/reward.txt)" = 0 ]; do n=x$n; [ ${#n} -lt 30 ] || break; sleep 0.1; done
    """,
    "replaces the tests' folder": "mv /tests/secret.txt /tests/old; echo mine > /tests/secret.txt; echo mine",
    "puts files beside the tests": "touch /tests/beside && echo right",
}


@pytest.mark.parametrize(
    ("disk", "first", "program"),
    [
        *(("none", HIDE, each) for each in PROGRAMS),
        *(("tmpfs", "", each) for each in PROGRAMS if each != "reads the answer"),
    ],
)
def test_tests_may_run_the_answer_as_another_user(disk, first, program, tmp_path):
    """Such a program can change neither the tests nor their result, and cannot read them if the tests forbid it."""
    files = {"tests/test.sh": TEST.format(how=SEPARATE, first=first), "tests/secret.txt": "right\n"}
    task = read_harbor_task(write_task(tmp_path / "one", files))
    backend = Choice("containers", {**BACKEND, "disk": disk})
    work = f"cat > answer.sh <<'END'\n{PROGRAMS[program]}\nEND\nchmod 755 answer.sh"

    found = grade_task(task, shell(work), backend=backend, image=IMAGE, boot_s=60.0, close_s=60.0)

    assert (found.value, found.problem) == (0.0, ""), found


@pytest.mark.parametrize(
    ("how", "program", "value"),
    [(SEPARATE, "echo right", 1.0), *(("/bin/sh", each, 1.0) for each in PROGRAMS.values())],
    ids=["a right answer", *(f"as root: {name}" for name in PROGRAMS)],
)
def test_what_an_answer_can_do_as_the_user_of_the_tests(how, program, value, tmp_path):
    """As the README says: each of these programs has a reward then; and one with the answer has it in both ways."""
    files = {"tests/test.sh": TEST.format(how=how, first=HIDE), "tests/secret.txt": "right\n"}
    task = read_harbor_task(write_task(tmp_path / "one", files))
    work = f"cat > answer.sh <<'END'\n{program}\nEND\nchmod 755 answer.sh"

    found = grade_task(task, shell(work), backend=Choice("containers", BACKEND), image=IMAGE, boot_s=60.0, close_s=60.0)

    assert found.value == value, found
