"""
The matrix of faults through the command line: each episode ends with the right status and owner, and nothing is left.

An episode that loses its workspace once runs again, in another one; one that loses each is failed. No fault of the
infrastructure is a reward of 0: such an episode is failed, and has no score.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from agent_runs import call, environment_of, write_run
from boxes import list_boxes, why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, why_no_containers
from task_folders import PASS, write_task

from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_workspace_tasks.harbor import read_harbor_task
from turnwise_workspaces.ownership import LABEL, read_owner

pytestmark = pytest.mark.slow
SOLVE: Final = "cp hint.txt answer.txt"
# What a fault does to an episode: its status, its owner and its reward.
GOOD: Final = ("completed", None, 1.0)
WRONG: Final = ("completed", None, 0.0)
LOST: Final = ("failed", "infra", None)
OUTCOMES: Final[Mapping[str, tuple[str, str | None, float | None]]] = {
    "none": GOOD,
    "boot_fails": LOST,
    "boot_fails_once": GOOD,
    "boot_hangs": LOST,
    "boot_hangs_once": GOOD,
    "exec_hangs_in_agent": LOST,
    "exec_hangs_in_grading": LOST,
    "killed_in_agent": LOST,
    "killed_in_grading": LOST,
    "killed_in_agent_once": GOOD,
    "killed_in_grading_once": GOOD,
    "exec_hangs_in_agent_once": GOOD,
    "close_fails": GOOD,
    "close_hangs": GOOD,
    "command_hangs": GOOD,
    "output_floods": GOOD,
    "disk_full": WRONG,
}
ENGINE_OUTCOMES: Final = dict.fromkeys(
    ("monitors_die_in_agent", "monitors_die_in_grading", "removed_in_agent", "removed_in_grading"), LOST
)
"""What happens to containers alone, when their engine loses them."""
WORK: Final = {
    **dict.fromkeys(("killed_in_agent", "monitors_die_in_agent", "removed_in_agent"), "echo ready; sleep 100"),
    "killed_in_agent_once": f"{SOLVE}; echo ready; sleep 1",
    "command_hangs": f"{SOLVE}; sleep 100",
    "output_floods": f"{SOLVE}; yes",
    "disk_full": f"head -c 67108864 /dev/zero > zero; {SOLVE}",
}
TESTS: Final = {
    **dict.fromkeys(
        ("killed_in_grading", "monitors_die_in_grading", "removed_in_grading"), "#!/bin/sh\necho ready; sleep 100\n"
    ),
    "killed_in_grading_once": f"{PASS}echo ready; sleep 1\n",
}
TURNS: Final = (call("shell", command="sh work.sh"), "Done.")


def write_matrix(folder: Path, faults: Mapping[str, int], tool: Mapping[str, Any]) -> None:
    """Write a run with a number of tasks for each fault."""
    rows = []
    for fault, number in faults.items():
        tests = {"tests/test.sh": TESTS[fault]} if fault in TESTS else {}
        settings = {"task.toml": "[verifier]\ntimeout_sec = 10.0\n"}
        row = read_harbor_task(write_task(folder / "tasks" / fault, tests | settings)).row()
        for each in range(number):
            name = f"{fault}-{each}"
            own = {"fault": fault, "name": name, "work.sh": WORK.get(fault, SOLVE)}
            rows.append({**row, "uid": name, "files": {**row["files"], **own}})
    source = Path(__file__).with_name("faults_by_task.py").read_text(encoding="utf-8")
    install_plugin(folder, "faults_by_task", source)
    # An engine takes seconds to see that it has lost a command.
    common = {"command_s": 8.0 if tool.get("image") else 2.0, "boot_s": 10.0, "close_s": 5.0, "limits": {"disk_mb": 16}}
    deadlines = {"tool_call_s": 900.0, "episode_s": 1200.0}
    write_run(folder, TURNS, {**common, **tool}, rows, deadlines=deadlines, reward="workspace_tests")
    (folder / "tmp").mkdir()


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the run, with a folder of temporary files of its own."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "--out", "out"]
    variables = environment_of(folder) | {"TMPDIR": str(folder / "tmp")}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log, text=True)


def boxes_of(pid: int) -> list[str]:
    """Return the processes of the boxes of a process, which may be gone."""
    labels = set()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        labels |= {after for before, after in pairwise(line) if before == LABEL}
    found = [label for label in labels if (owner := read_owner(label)) is not None and owner.pid == pid]
    return [each for label in found for each in list_boxes(label)]


def expect_outcomes(folder: Path, faults: Mapping[str, int]) -> None:
    """Compare the end of each episode with that of its fault."""
    found = Counter()
    for episode in read_results(folder / "out"):
        fault = episode.task.uid.rpartition("-")[0]
        found[fault, str(episode.status), episode.fault and episode.fault.owner, episode.reward] += 1
    assert {(fault, *(OUTCOMES | ENGINE_OUTCOMES)[fault]): number for fault, number in faults.items()} == found


def expect_no_files(folder: Path) -> None:
    """Compare what is left in the folder of temporary files with nothing; torch keeps a cache there."""
    assert [each for each in folder.iterdir() if not each.name.startswith("torchinductor_")] == []


def expect_nothing_left(folder: Path, pid: int) -> None:
    """No process, no mount, no file but the locks of the slots."""
    assert boxes_of(pid) == []
    mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    assert str(folder) not in mounts
    expect_no_files(folder / "tmp")
    assert not any(child.is_dir() for child in (folder / "state").iterdir())


@pytest.mark.many_cases(10)
@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
def test_the_matrix_in_boxes(tmp_path):
    """200 episodes, of which 40 have no machine, and 4 each have another fault."""
    faults = dict.fromkeys(OUTCOMES, 4) | {"boot_fails": 40}
    faults["none"] = 200 - sum(faults.values()) + faults["none"]
    write_matrix(tmp_path, faults, {"backend": "faults_by_task", "max_workspaces": 8})

    running = start(tmp_path)
    running.wait()

    assert running.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    expect_outcomes(tmp_path, faults)
    expect_nothing_left(tmp_path, running.pid)


@pytest.mark.many_cases(10)
def test_the_matrix_in_containers(tmp_path):
    """Each fault once, in containers, and what happens to those of podman alone."""
    if reason := why_no_containers():
        pytest.skip(reason)
    options = {"command": list(ENGINE), "run_options": list(RUN_OPTIONS)}
    backend = {"name": "faults_by_task", "inner": "containers", "options": options}
    is_podman = "podman" in ENGINE[0]  # no other engine has a monitor for each command
    own = [name for name in ENGINE_OUTCOMES if is_podman or not name.startswith("monitors")]
    faults = dict.fromkeys([*OUTCOMES, *own], 1) | {"none": 4}  # a run that loses most episodes has failed
    write_matrix(tmp_path, faults, {"backend": backend, "image": IMAGE, "max_workspaces": 3, "boot_s": 30.0})

    running = start(tmp_path)
    running.wait()

    assert running.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    expect_outcomes(tmp_path, faults)
    assert list_containers() == []
    expect_no_files(tmp_path / "tmp")


@pytest.mark.many_cases(10)
@pytest.mark.parametrize("inner", ["bubblewrap", "containers"])
def test_faults_of_warm_workspaces_are_none_of_episodes(inner, tmp_path):
    """Most warm workspaces fail, hang, die before their use or do not answer; each episode has its reward."""
    if reason := why_no_boxes() if inner == "bubblewrap" else why_no_containers():
        pytest.skip(reason)
    options = {"command": list(ENGINE), "run_options": list(RUN_OPTIONS)} if inner == "containers" else {}
    backend = {"name": "faults_by_task", "inner": inner, "options": options, "warm_faults": True}
    number, image = (30, "") if inner == "bubblewrap" else (12, IMAGE)
    tool = {"backend": backend, "image": image, "max_workspaces": 5, "warm": 2, "boot_s": 5.0}
    write_matrix(tmp_path, {"none": number}, tool)
    config = json.loads((tmp_path / "run.yaml").read_text())
    config["rollout"]["max_in_flight"] = 2  # with more episodes than workspaces each of them waits for one
    (tmp_path / "run.yaml").write_text(json.dumps(config))

    running = start(tmp_path)
    running.wait()

    assert running.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    expect_outcomes(tmp_path, {"none": number})
    sums = Counter()
    for episode in read_results(tmp_path / "out"):
        sums.update({name: value for name, value in episode.metrics.extra.items() if "_warm_" in name})
    assert sums["workspace_warm_hits"] + sums["workspace_warm_misses"] == number
    assert min(sums[f"workspace_warm_{name}"] for name in ("hits", "losses", "failures")) >= 1, sums
    expect_nothing_left(tmp_path, running.pid)
    if image:
        assert list_containers() == []


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
def test_a_killed_driver_leaves_nothing_in_the_way(tmp_path):
    """The system ends the boxes of a driver that is killed at its work, and the next run has all slots."""
    write_matrix(tmp_path, {"command_hangs": 2}, {"backend": "faults_by_task", "max_workspaces": 2})
    killed = start(tmp_path)
    while len(boxes_of(killed.pid)) < 2:
        assert killed.poll() is None, (tmp_path / "log").read_text()[-2000:]

    killed.kill()
    killed.wait()

    while boxes_of(killed.pid):
        os.sched_yield()
    again = start(tmp_path)
    again.wait()
    assert again.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    expect_outcomes(tmp_path, {"command_hangs": 2})
    expect_nothing_left(tmp_path, again.pid)
