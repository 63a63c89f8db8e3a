"""Programs of outside agents inside the workspaces of their episodes, through the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest
from gateway_rollouts import start_rollout, wait_until
from inside_runs import list_marked, read_episodes, roll_out, why_no_boxes, write_inside

from turnwise_testing.whole_runs.installation import install_plugin

pytestmark = [
    pytest.mark.usefixtures("starts_a_process"),
    pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes()),
]


def said(episode):
    """Return the last text that the program sent to the model."""
    return [each["content"] for each in episode.messages if each["role"] == "user"][-1]


def run_one(folder, *arguments, **sections):
    """Return the one episode of a run."""
    write_inside(folder, *arguments, **sections)
    _, log = roll_out(folder)
    episodes = read_episodes(folder)
    assert len(episodes) == 1, log
    return episodes[0]


def check_ten(folder):
    """Ten episodes have their score, and one record with the sampled tokens of both turns."""
    episodes = read_episodes(folder)
    assert [str(each.status) for each in episodes] == ["completed"] * 10, [each.fault for each in episodes]
    for episode in episodes:
        assert [score.value for score in episode.scores] == [0.5]
        (record,) = episode.trajectories
        assert len(record.turns()) == 2
        assert sum(record.response_mask) == 24  # two replies of twelve tokens


@pytest.mark.slow
def test_ten_programs_work_at_once(tmp_path):
    """Each in its box, with its task, and a score at the end of an output of three megabytes."""
    write_inside(tmp_path, "converse", num_tasks=10)

    code, log = roll_out(tmp_path)

    assert code == 0, log
    check_ten(tmp_path)


@pytest.mark.ray
@pytest.mark.slow
def test_ten_programs_work_at_once_on_ray(tmp_path):
    """Workers of Ray start them as a process does."""
    write_inside(tmp_path, "converse", num_tasks=10, runtime={"name": "ray", "num_workers": 2})

    code, log = roll_out(tmp_path)

    assert code == 0, log
    check_ten(tmp_path)


@pytest.mark.slow
def test_tools_and_program_share_a_workspace(tmp_path):
    """The program finds the file that a tool of the run wrote."""
    episode = run_one(tmp_path, "use_tools", tools={}, parser="hermes")

    assert str(episode.status) == "completed", episode.fault
    assert said(episode) == "/workspace from the tool"


GRADING = """
from turnwise import hookimpl


class Grades:
    def __init__(self, config, resources):
        pass

    def grading_s(self, task):
        return 30.0

    async def score(self, episode):
        workspace = await episode.open_tool("shell")
        return float(await workspace.read("seen", max_bytes=100) == b"from the tool\\n")


@hookimpl
def register_rewards(registry):
    registry.add("grades", Grades)
"""


@pytest.mark.slow
def test_the_workspace_lives_until_it_is_graded(tmp_path):
    """A reward finds the program's file in the same workspace, in which no process of the program is left."""
    install_plugin(tmp_path / "site", "acme_grades", GRADING)

    episode = run_one(tmp_path, "use_tools", tools={}, parser="hermes", reward="grades", plugins=None)

    assert str(episode.status) == "completed", episode.fault
    assert [score.value for score in episode.scores] == [1.0]


@pytest.mark.slow
def test_a_program_sees_its_own_variables(tmp_path, monkeypatch):
    """It has those of the workspace, the client and its options, and nothing of the worker but what `inherit` names."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("WANTED", "x")
    options = {"environment": {"MORE": "1"}, "inherit": ["WANTED"], "workspace": {"environment": {"WORD": "y"}}}

    names = set(said(run_one(tmp_path, "show_variables", agent=options)).split())

    client = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "TURNWISE_MODEL"}
    box = {"HOME", "LANG", "PATH", "TERM", "USER", "WORD"}
    assert names - {"LC_CTYPE", "PWD"} == client | {"TURNWISE_MCP_URL", "TURNWISE_TASK", "MORE", "WANTED"} | box


@pytest.mark.parametrize(
    ("arguments", "agent", "status", "owner", "text"),
    [
        (["fail"], {}, "failed", "agent", "exit code 3 a reason"),
        ([], {"command": ["no-such-program"]}, "failed", "infra", "the workspace has no such program"),
        ([], {"command": ["true"]}, "failed", "agent", "the agent ended without a call"),
        (["hang"], {"session_s": 3.0}, "timed_out", "agent", "longer than 3.0 s"),
        (["grow"], {"workspace": {"limits": {"memory_mb": 200}}}, "failed", "agent", ""),
        (["leave"], {}, "completed", None, ""),
        (["converse"], {"workspace": {"boot_s": 0.001}}, "failed", "infra", "did not start in 2 tries"),
    ],
)
@pytest.mark.slow
def test_ends_have_their_owners(tmp_path, arguments, agent, status, owner, text):
    """The end of a program is the agent's, a workspace without it the infrastructure's, and no process is left."""
    episode = run_one(tmp_path, *arguments, agent=agent)

    assert str(episode.status) == status, episode.fault
    assert (episode.fault.owner if episode.fault else None) == owner
    assert text in (episode.fault.message if episode.fault else "")
    assert [pid for name in arguments for pid in list_marked(f"agent.py\0{name}")] == []


@pytest.mark.slow
def test_a_lost_workspace_is_a_fault_of_the_infrastructure(tmp_path):
    """The box is killed from outside while the program runs, and the episode has no second try."""
    write_inside(tmp_path, "hang", rollout={"episode_tries": 1})
    driver = start_rollout(tmp_path, "run.yaml", "--out", "out")
    label = f"/{driver.pid}/"
    log = (tmp_path / "log").read_text

    wait_until(lambda: [pid for pid in list_marked(label) if pid in list_marked("turnwise-box")], log)
    wait_until(lambda: list_marked("agent.py\0hang"), log)
    for pid in list_marked(label):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    driver.wait(120)
    (episode,) = read_episodes(tmp_path)
    assert episode.fault is not None
    assert (episode.fault.owner, "the workspace is lost" in episode.fault.message) == ("infra", True), episode.fault


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM))],
)
def test_nothing_is_left_of_a_driver_that_ends(tmp_path, number):
    """Boxes, programs and what they started are gone, and the slots are free for the next run."""
    write_inside(tmp_path, "hang", num_tasks=3, agent={"workspace": {"max_workspaces": 3}})
    driver = start_rollout(tmp_path, "run.yaml", "--out", "out")
    label = f"/{driver.pid}/"
    log = (tmp_path / "log").read_text
    wait_until(lambda: len(list_marked("agent.py\0hang")) >= 6, log)

    driver.send_signal(number)
    driver.wait(120)

    wait_until(lambda: not list_marked(label) and not list_marked("agent.py\0hang"), log)
    write_inside(tmp_path / "again", "converse", agent={"workspace": {"state": str(tmp_path / "state"), "wait_s": 5.0}})
    assert roll_out(tmp_path / "again")[0] == 0


def test_a_program_reaches_its_session_and_nothing_else(tmp_path):
    """Ports of this machine, the service of metadata and the network are not there; a guessed key is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())
        addresses = [f"127.0.0.1:{port}", f"{own}:{port}", "169.254.169.254:80", "1.1.1.1:53", "127.0.0.1:22"]
        episode = run_one(tmp_path, "escape", *addresses)

    assert said(episode) == "reached [] guess 401"


@pytest.mark.parametrize(
    ("agent", "sections", "text"),
    [
        ({"workspace": {"mounts": {"opt": "/usr"}}}, {}, "mounts: expected an absolute path in the workspace"),
        ({"workspace": {"mounts": {"/opt/x": "/no/such"}}}, {}, "mounts: /opt/x: there is no /no/such"),
        ({"workspace": {"mounts": {"/usr/x": "/usr"}}}, {}, "a box shows this machine's there"),
        ({"workspace": {"mounts": {"/proc/x": "/usr"}}}, {}, "it is a folder of the system"),
        ({"workspace": {"mounts": {"/workspace": "/usr"}}}, {}, "it would hide the working folder"),
        ({"workspace": {"mounts": {"/opt/x": "/dev/null"}}}, {}, "neither a folder nor a file"),
        ({"workspace": {"imag": "x"}}, {}, "did you mean 'image'"),
        ({"workspace": {"backend": "bubblewrp"}}, {}, "did you mean 'bubblewrap'"),
        ({"workspace": {"folder": "/work"}}, {"tools": {}, "parser": "hermes"}, "write {} here"),
        ({"command": [], "function": "json:loads"}, {}, "workspace needs command"),
    ],
)
@pytest.mark.slow
def test_bad_options_are_one_line(tmp_path, agent, sections, text):
    """They stop the run before its first episode."""
    write_inside(tmp_path, "converse", agent=agent, **sections)

    code, log = roll_out(tmp_path)

    assert (code, text in " ".join(log.split()), "Traceback" in log) == (2, True, False), log


LOSING = """
from pathlib import Path

from turnwise import hookimpl
from turnwise.errors import InfrastructureError
from turnwise_testing.probes.faulty_workspaces import PassingBackend, PassingWorkspace
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig

LOG = Path(__file__).with_name("programs")


class Losing(PassingBackend):
    @property
    def capabilities(self):
        return self.inner.capabilities

    async def start(self, spec):
        return Lost(await self.inner.start(spec))


class Lost(PassingWorkspace):
    async def listen(self):
        return await self.inner.listen()

    async def run(self, command, on_output):
        done = await self.inner.run(command, on_output)
        with LOG.open("a") as log:
            log.write("one\\n")
        if len(LOG.read_text().split()) == 1:
            raise InfrastructureError("its machine is gone")
        return done


@hookimpl
def register_workspaces(registry):
    registry.add("losing", lambda config, resources: Losing(BubblewrapBackend(BubblewrapConfig(), resources)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param({"name": "ray", "num_workers": 2}, marks=pytest.mark.ray)])
def test_a_program_whose_workspace_is_lost_works_again(runtime, tmp_path):
    """From the start, in a new session: the calls and the score of the lost attempt are in no record."""
    install_plugin(tmp_path, "losing_workspaces", LOSING)
    agent = {"workspace": {"backend": "losing"}}
    episode = run_one(tmp_path, "converse", agent=agent, plugins=None, runtime=runtime)

    assert str(episode.status) == "completed", episode.fault
    assert (tmp_path / "programs").read_text() == "one\none\n"
    assert episode.metrics.extra["lost_attempts"] == 1.0
    assert [score.value for score in episode.scores] == [0.5]
    (record,) = episode.trajectories
    assert (len(record.turns()), sum(record.response_mask)) == (2, 24)
