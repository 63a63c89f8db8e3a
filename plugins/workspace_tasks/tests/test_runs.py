"""Runs through the command line whose episodes are graded by hidden tests."""

from __future__ import annotations

import pytest
from agent_runs import answers, call, roll_out, write_run
from boxes import why_no_boxes
from task_folders import write_task

from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin

FAULTY = """
from turnwise import hookimpl
from turnwise_testing.probes.faulty_workspaces import Faults, FaultyBackend, MemoryBackend


@hookimpl
def register_workspaces(registry):
    registry.add("faulty", lambda config, resources: FaultyBackend(MemoryBackend(), config), config=Faults)
"""
SOLVE = (call("shell", command="ls /tests /solution; cat hint.txt; echo done > answer.txt"), "Done.")
WRONG = (call("shell", command="echo wrong > answer.txt"), "Done.")
IDLE = ("I do nothing.",)

needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())


def run(folder, turns, tool=None, **sections):
    """Roll out the tasks below `tasks`, and return the finished command and the episodes."""
    given = {"data": {"path": "harbor:tasks"}, "reward": "workspace_tests", **sections}
    write_run(folder, turns, tool or {}, **given)
    done = roll_out(folder)
    return done, list(read_results(folder / "out")) if (folder / "out").exists() else []


@pytest.mark.many_cases(1)
@needs_boxes
@pytest.mark.parametrize(("turns", "reward"), [(SOLVE, 1.0), (WRONG, 0.0), (IDLE, 0.0)])
def test_episodes_are_graded(turns, reward, tmp_path):
    """The tests run after the agent, which sees neither them nor the solution; doing nothing is graded, too."""
    for name in ("first", "second"):
        write_task(tmp_path / "tasks" / name)

    done, episodes = run(tmp_path, turns)

    assert done.returncode == 0, done.stderr
    assert sorted(each.task.uid for each in episodes) == ["first", "second"]
    for episode in episodes:
        assert (str(episode.status), episode.reward) == ("completed", reward), episode.fault
        assert episode.metrics.extra["tests_reward"] == reward
        assert episode.messages[0]["content"] == "Write `done` to answer.txt."
    if turns is SOLVE:
        assert answers(episodes[0]) == ["/solution:\n\n/tests:\ndone"]


@pytest.mark.ray
@pytest.mark.slow
@needs_boxes
def test_episodes_are_graded_on_ray(tmp_path):
    """Workers of Ray grade in the workspaces that they have."""
    write_task(tmp_path / "tasks" / "first")

    done, (episode,) = run(tmp_path, SOLVE, runtime="ray")

    assert done.returncode == 0, done.stderr
    assert episode.reward == 1.0, episode.fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "text"),
    [({"failing_starts": 9}, "a workspace did not start in 2 tries"), ({"exec_loses": True}, "the workspace is lost")],
)
def test_a_fault_of_the_workspace_is_no_score(faults, text, tmp_path):
    """An episode that cannot be graded has no reward, and the infrastructure is to blame."""
    write_task(tmp_path / "tasks" / "first")
    install_plugin(tmp_path, "faulty_workspaces_plugin", FAULTY, entry="faulty_workspaces")

    _, (episode,) = run(tmp_path, IDLE, {"backend": {"name": "faulty", **faults}})

    assert (str(episode.status), episode.scores) == ("failed", ())
    assert (episode.fault.owner, text in str(episode.fault)) == ("infra", True), episode.fault


@pytest.mark.slow
@needs_boxes
def test_tests_have_their_own_time(tmp_path):
    """The time of a task's tests counts, and neither the agent's nor the usual one of rewards."""
    slow = "#!/bin/sh\nsleep 2\necho 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "tasks" / "slow", {"tests/test.sh": slow})
    write_task(
        tmp_path / "tasks" / "stuck",
        {"tests/test.sh": slow.replace("2", "100"), "task.toml": "[verifier]\ntimeout_sec=1\n"},
    )

    done, episodes = run(tmp_path, IDLE, deadlines={"reward_s": 0.5})

    assert done.returncode == 0, done.stderr
    by_name = {each.task.uid: each for each in episodes}
    assert by_name["slow"].reward == 1.0
    assert (by_name["stuck"].reward, by_name["stuck"].metrics.extra["tests_not_counted"]) == (0.0, 1.0)


@pytest.mark.slow
def test_the_reward_needs_workspaces_and_tests(tmp_path):
    """A run without the tools stops before its first episode, and a row without tests is the data's fault."""
    done, _ = run(tmp_path, IDLE, data={"path": "data.jsonl"}, tools=[])
    assert (done.returncode, "needs the tools 'workspace'" in done.stderr) == (2, True), done.stderr

    _, (episode,) = run(tmp_path, IDLE, data={"path": "data.jsonl"})
    assert "has no column 'tests'" in str(episode.fault)


@pytest.mark.ray
@pytest.mark.slow
def test_reward_workers_are_refused(tmp_path):
    """No reward worker has the workspace."""
    write_task(tmp_path / "tasks" / "first")

    done, _ = run(tmp_path, IDLE, runtime={"name": "ray", "reward_workers": 1})

    assert (done.returncode, "no reward worker has" in done.stderr) == (2, True), done.stderr
