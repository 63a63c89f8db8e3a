"""Runs through the command line, whose model works in boxes."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from agent_runs import answers, call, roll_out, write_run
from boxes import list_orphans, why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, why_no_containers

from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin

WORK = (
    call("shell", command="cat task.txt; (while [ ! -e go ]; do sleep 0.05; done; echo went > seen) & echo started"),
    call("edit_file", path="task.txt", old="two", new="2") + call("read_file", path="/etc/shadow"),
    call("shell", command="touch go; while [ ! -s seen ]; do sleep 0.05; done; cat seen task.txt; exit 3"),
    "Done.",
)
FAULTY = """
from turnwise import hookimpl, Resources
from turnwise_testing.probes.faulty_workspaces import Faults, FaultyBackend, MemoryBackend


@hookimpl
def register_workspaces(registry):
    registry.add("faulty", lambda config, resources: FaultyBackend(MemoryBackend(), config), config=Faults)
"""
ECHO = (call("shell", command="echo"), "Done.")

needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())


def check_work(folder):
    """Compare what the model read in two episodes with what its commands print."""
    episodes = list(read_results(folder / "out"))
    assert len(episodes) == 2
    for episode in episodes:
        number = episode.messages[0]["content"].removeprefix("Question ")
        assert str(episode.status) == "completed", episode.fault
        assert answers(episode) == [
            f"one two {number}\nstarted",
            "replaced 1 place",
            "Error: cannot read '/etc/shadow': No such file or directory",
            f"went\none 2 {number}\n[exit code 3]",
        ]


ROWS = [{"files": {"task.txt": f"one two {number}\n"}} for number in range(2)]


@needs_boxes
def test_an_agent_works_in_a_box(tmp_path):
    """Each episode has its files, keeps its background processes between calls, and reads every result."""
    write_run(tmp_path, WORK, {}, ROWS)

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    check_work(tmp_path)


@pytest.mark.slow
@needs_boxes
@pytest.mark.parametrize("network", ["none", "host"])
def test_commands_reach_a_server_of_this_machine_if_the_run_says_so(network, tmp_path):
    """Only with `network: host`, and a task that forbids it does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection(('localhost', {server.getsockname()[1]}), 5); print('in')"
        work = (call("shell", command=f'/usr/bin/python3 -c "{connect}" 2>&1 | tail -n 1'), "Done.")
        write_run(tmp_path, work, {"network": network}, [{}, {"workspace": {"network": "none"}}])

        done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    free, closed = (answers(each)[0] for each in sorted(read_results(tmp_path / "out"), key=lambda each: each.uid))
    assert (free == "in") == (network == "host"), free
    assert "refused" in closed


@pytest.mark.ray
@pytest.mark.slow
@needs_boxes
def test_an_agent_works_in_a_box_on_ray(tmp_path):
    """Workers of Ray start boxes as a process does."""
    write_run(tmp_path, WORK, {}, ROWS, runtime="ray")

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    check_work(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "containers"])
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_episodes_get_warm_workspaces_and_none_is_left(runtime, backend, tmp_path):
    """Each episode has its files in a workspace of its own, and the warm ones end with the run, on both runtimes."""
    if reason := why_no_boxes() if backend == "bubblewrap" else why_no_containers():
        pytest.skip(reason)
    containers = {"name": "containers", "command": list(ENGINE), "run_options": list(RUN_OPTIONS)}
    options = {"image": IMAGE, "backend": containers} if backend == "containers" else {}
    work = (call("shell", command="cat task.txt; ls | wc -l; touch left; sleep 1"), "Done.")
    rows = [{"files": {"task.txt": f"{number}\n"}} for number in range(6)]
    rollout = {"n": 1, "prompt_length": 16384, "response_length": 16384, "max_in_flight": 1}
    write_run(tmp_path, work, {"warm": 2, **options}, rows, runtime=runtime, rollout=rollout)

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    episodes = list(read_results(tmp_path / "out"))
    assert sorted(answers(each)[0].split() for each in episodes) == [[f"{number}", "1"] for number in range(6)]
    sums = [
        sum(each.metrics.extra.get(f"workspace_warm_{name}", 0) for each in episodes) for name in ("hits", "misses")
    ]
    assert sum(sums) == 6
    assert sums[0] >= 3
    assert list_orphans() == []
    if backend == "containers":
        assert list_containers() == []


HAND_IN = (
    call("shell", command="cat task.txt > answer.txt"),
    call("shell", command="sleep 0.2; echo more >> answer.txt") + call("submit", message="I copied it."),
    "Not said.",
)


def check_hand_in(folder):
    """The episodes are complete, with their two turns, all three calls, and no result of the last turn."""
    episodes = list(read_results(folder / "out"))
    assert len(episodes) == 2
    for episode in episodes:
        assert str(episode.status) == "completed", episode.fault
        assert answers(episode) == ["(no output)"]
        assert (episode.metrics.num_turns, episode.metrics.num_tool_calls) == (2, 3)
        assert episode.metrics.extra["tool/workspace_submitted"] == 1.0
        assert episode.metrics.extra["tool/workspace_commands"] == 2.0


@needs_boxes
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_the_model_hands_in(runtime, tmp_path):
    """The tool `submit` ends the episode when the other calls of its turn have ended, on both runtimes."""
    write_run(tmp_path, HAND_IN, {"tools": ["shell", "submit"]}, ROWS, runtime=runtime)

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    check_hand_in(tmp_path)


@pytest.mark.parametrize(
    ("faults", "deadlines", "status", "text"),
    [
        ({"failing_starts": 1}, {}, "completed", ""),
        ({"failing_starts": 9}, {}, "failed", "a workspace did not start in 2 tries"),
        ({"hanging_starts": 9}, {}, "failed", "it took more than 0.2 s"),
        ({"hanging_starts": 9}, {"tool_call_s": 0.1}, "failed", "over before the workspace had started"),
        ({"hanging_starts": 9}, {"episode_s": 0.1}, "failed", "over before the workspace had started"),
        ({"exec_loses": True}, {}, "failed", "the workspace is lost"),
        ({"exec_raises": True}, {}, "failed", "a mistake in a backend"),
        ({"close_fails": True}, {}, "completed", ""),
        ({"close_hangs": True}, {}, "completed", ""),
    ],
)
@pytest.mark.slow
def test_episodes_with_faults_end_in_order(faults, deadlines, status, text, tmp_path):
    """A fault of the infrastructure fails the episode with this owner, and one at the end does not change it."""
    install_plugin(tmp_path, "faulty_workspaces_plugin", FAULTY, entry="faulty_workspaces")
    options = {"backend": {"name": "faulty", **faults}, "boot_s": 0.2, "close_s": 0.2}
    write_run(tmp_path, ECHO, options, deadlines=deadlines)

    done = roll_out(tmp_path)

    assert done.returncode == (0 if status == "completed" else 1), done.stderr  # no episode is left
    (episode,) = read_results(tmp_path / "out")
    assert str(episode.status) == status, done.stderr
    if status == "failed":
        assert episode.fault is not None
        assert (episode.fault.owner, text in str(episode.fault)) == ("infra", True), episode.fault


LOSING = """
import os
from pathlib import Path
from turnwise import hookimpl
from turnwise.errors import InfrastructureError
from turnwise_testing.probes.faulty_workspaces import MemoryBackend, PassingBackend, PassingWorkspace

LOG = Path(__file__).with_name("processes")


class Losing(PassingBackend):
    async def start(self, spec):
        return Lost(await self.inner.start(spec))


class Lost(PassingWorkspace):
    async def exec(self, command, on_output=None):
        with LOG.open("a") as log:
            log.write(f"{os.getpid()}\\n")
        if len(LOG.read_text().split()) == 1:
            raise InfrastructureError("its machine is gone")
        return await self.inner.exec(command, on_output)


@hookimpl
def register_workspaces(registry):
    registry.add("losing", lambda config, resources: Losing(MemoryBackend()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tries", "runtime"),
    [
        (2, "local"),
        (1, "local"),
        pytest.param(2, {"name": "ray", "num_workers": 2}, marks=pytest.mark.ray),
        pytest.param(2, {"name": "ray", "num_workers": 1}, marks=pytest.mark.ray),
    ],
)
def test_an_episode_that_loses_its_workspace_runs_again(tries, runtime, tmp_path):
    """In another workspace, and on Ray on another worker, which may be on another machine, if there is one."""
    install_plugin(tmp_path, "losing_workspaces", LOSING)
    write_run(tmp_path, ECHO, {"backend": "losing"}, runtime=runtime)

    done = roll_out(tmp_path, f"rollout.episode_tries={tries}")

    (episode,) = read_results(tmp_path / "out")
    processes = (tmp_path / "processes").read_text().split()
    if tries == 1:
        assert (episode.fault.owner, len(processes)) == ("infra", 1), done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert str(episode.status) == "completed", episode.fault
    assert (len(processes), episode.metrics.extra["lost_attempts"]) == (2, 1.0)
    assert episode.metrics.num_turns == 2
    if runtime != "local":
        assert len(set(processes)) == runtime["num_workers"]


GUIDE = Path(__file__).parents[3] / "docs/how-to/train-a-coding-agent.md"
ATTEMPTS = ("cat hint; rm -rf * .[!.]*; echo wrong > other", "ls -A; cp hint answer.txt", "Not said.")
FIRST_FILES = {"hint": "done\n", ".hidden/file": ""}


def write_attempts(folder, options, **sections):
    """Write the run of the guide's agent, whose model first destroys the files."""
    (folder / "attempts.py").write_text(re.search(r"```python attempts.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1])
    agent = {"name": "./attempts.py:Attempts"}
    write_run(folder, ATTEMPTS, options, [{"files": FIRST_FILES}], agent=agent, modules=["./attempts.py"], **sections)


@needs_boxes
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_the_guides_agent_tries_again_from_the_same_files(runtime, tmp_path):
    """Its second command finds what its first one removed, and nothing of what that made."""
    write_attempts(tmp_path, {}, runtime=runtime)

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    (episode,) = read_results(tmp_path / "out")
    assert str(episode.status) == "completed", episode.fault
    said = [message["content"] for message in episode.messages[1:]]
    assert said == [ATTEMPTS[0], "done\n\nThe check failed. The files are as before; try again.", ATTEMPTS[1]]


@needs_boxes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"), [("snapshot_hangs", "a snapshot did not end"), ("restore_loses", "the box has ended")]
)
def test_an_agent_whose_snapshots_fail(fault, text, tmp_path):
    """The infrastructure is to blame, and the episode has no reward."""
    plugin = FAULTY.replace("MemoryBackend()", "make_bubblewrap(BubblewrapConfig(), resources)").replace(
        "\n\n@hookimpl",
        "\nfrom turnwise_workspaces import make_bubblewrap, owner\n"
        "from turnwise_workspaces.config import BubblewrapConfig\n\n\n@hookimpl",
    )
    if fault == "snapshot_hangs":  # with the second half of its time, 10 s, it would take so long
        plugin += "\n\nowner.SNAPSHOT_S = -9.9\n"
    install_plugin(tmp_path, "faulty_workspaces_plugin", plugin, entry="faulty_workspaces")
    write_attempts(tmp_path, {"backend": {"name": "faulty", fault: True}})

    done = roll_out(tmp_path)

    assert done.returncode == 1, done.stderr
    (episode,) = read_results(tmp_path / "out")
    assert episode.fault is not None
    assert (str(episode.status), episode.fault.owner) == ("failed", "infra"), episode.fault
    assert text in str(episode.fault)


@pytest.mark.slow
def test_a_backend_without_snapshots_stops_the_run(tmp_path):
    """Before any episode, in one line with the name of the backend."""
    plain = FAULTY.replace("FaultyBackend(MemoryBackend(), config)", "Plain()").replace(
        "\n\n@hookimpl",
        "\nfrom turnwise_workspaces import Capabilities\n\n\n"
        "class Plain(MemoryBackend):\n    capabilities = Capabilities()\n\n\n@hookimpl",
    )
    install_plugin(tmp_path, "faulty_workspaces_plugin", plain, entry="faulty_workspaces")
    write_attempts(tmp_path, {"backend": "faulty"})

    done = roll_out(tmp_path)

    assert done.returncode == 2
    assert "the backend 'faulty' takes no snapshots, which this run needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_bad_backend_is_one_line(tmp_path):
    """A name that no plugin has, and options that do not fit, stop the run before its first episode."""
    for backend, text in (("bubblewrp", "did you mean 'bubblewrap'"), ({"name": "bubblewrap", "sise": 1}, "sise")):
        write_run(tmp_path, ECHO, {"backend": backend})

        done = roll_out(tmp_path)

        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr
