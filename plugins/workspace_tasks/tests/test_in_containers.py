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
