"""The engine of containers is started again under a run: no reward is wrong, and the lost episodes run again."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from agent_runs import call, environment_of, run_cli, write_run
from engine_service import Service
from images import IMAGE, RUN_OPTIONS, list_containers, why_no_containers
from task_folders import write_task

from turnwise_result_files import read_results
from turnwise_workspace_tasks.harbor import read_harbor_task

pytestmark = pytest.mark.slow
SOLVE = "cp hint.txt answer.txt"
WAIT = "sleep 98771"
WAITING_TESTS = f"#!/bin/sh\n{WAIT}\necho 1 > /logs/verifier/reward.txt\n"


def wait_for(command: str, running: subprocess.Popen[str]) -> None:
    """Wait until a command runs in a container."""
    while subprocess.run(["pgrep", "-fx", command], stdout=subprocess.DEVNULL, check=False).returncode != 0:
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)


@pytest.fixture
def service(tmp_path):
    """A service that ends with its test, also with one that fails."""
    if reason := why_no_containers():
        pytest.skip(reason)
    service = Service(tmp_path / "podman.sock")
    service.start()
    yield service
    service.kill()


@pytest.mark.parametrize("place", ["agent", "grading"])
def test_episodes_of_an_engine_that_is_started_again(place, service, tmp_path):
    """One that lost its only try has no reward and the owner `infra`, and is right when it runs again."""
    tests = {"tests/test.sh": WAITING_TESTS} if place == "grading" else {}
    row = read_harbor_task(write_task(tmp_path / "task", tests)).row()
    backend = {"name": "containers", "command": list(service.command), "run_options": list(RUN_OPTIONS)}
    tool = {"backend": backend, "image": IMAGE, "boot_s": 60.0, "close_s": 60.0, "command_s": 60.0}
    turns = (call("shell", command=f"{SOLVE}{f'; {WAIT}' if place == 'agent' else ''}"), "Done.")
    deadlines = {"tool_call_s": 300.0, "episode_s": 600.0}
    write_run(tmp_path, turns, tool, [row], deadlines=deadlines, reward="workspace_tests")

    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "rollout.episode_tries=1", "--out", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment_of(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        wait_for(WAIT, running)
        service.kill()
        service.start()
        _, errors = running.communicate()

    assert running.returncode == 1, errors  # no episode is left
    (episode,) = read_results(tmp_path / "out")
    assert episode.fault is not None
    assert (str(episode.status), episode.fault.owner, episode.reward) == ("failed", "infra", None), errors
    # The waits are over. The results have the rows of the tasks, so that their tests cannot be others now.
    (tmp_path / "turns.json").write_text(json.dumps([turns[0].replace(f"; {WAIT}", ""), "Done."]))
    if place == "agent":
        again = run_cli(tmp_path, "rollout", "--resume", "out", "--retry-failed")
        assert again.returncode == 0, again.stderr
        (episode,) = read_results(tmp_path / "out")
        assert (str(episode.status), episode.reward) == ("completed", 1.0)
    while list_containers():
        time.sleep(0.1)
