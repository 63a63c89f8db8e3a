"""Programs of outside agents inside containers of podman; what they do is as in boxes."""

from __future__ import annotations

import signal
import socket

import pytest
from gateway_rollouts import start_rollout, wait_until
from inside_runs import container_options, list_marked, read_episodes, roll_out, write_inside

pytestmark = [pytest.mark.usefixtures("starts_a_process"), pytest.mark.slow]


@pytest.fixture
def containers():
    """The options of the workspaces; at the end no container is left."""
    options = container_options()
    yield options
    from images import list_containers

    assert list_containers() == []


def test_ten_programs_work_at_once(tmp_path, containers):
    """Each has its container, its score and one record with the sampled tokens of both turns."""
    write_inside(tmp_path, "converse", num_tasks=10, agent={"workspace": containers})

    code, log = roll_out(tmp_path)

    assert code == 0, log
    episodes = read_episodes(tmp_path)
    assert [str(each.status) for each in episodes] == ["completed"] * 10, [each.fault for each in episodes]
    for episode in episodes:
        (record,) = episode.trajectories
        assert ([0.5], 2) == ([score.value for score in episode.scores], len(record.turns()))
        assert sum(record.response_mask) == 24  # two replies of twelve tokens


def test_a_program_reaches_its_session_and_nothing_else(tmp_path, containers):
    """Ports of this machine, the service of metadata and the network are not there; a guessed key is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())
        addresses = [f"127.0.0.1:{port}", f"{own}:{port}", "169.254.169.254:80", "1.1.1.1:53"]
        write_inside(tmp_path, "escape", *addresses, agent={"workspace": containers})
        roll_out(tmp_path)

    (episode,) = read_episodes(tmp_path)
    assert [each["content"] for each in episode.messages if each["role"] == "user"] == ["reached [] guess 401"]


@pytest.mark.parametrize(
    ("arguments", "agent", "status", "owner", "text"),
    [
        (["fail"], {}, "failed", "agent", "exit code 3 a reason"),
        ([], {"command": ["no-such-program"]}, "failed", "infra", "the workspace has no such program"),
        (["hang"], {"session_s": 5.0}, "timed_out", "agent", "longer than 5.0 s"),
        (["leave"], {}, "completed", None, ""),
    ],
)
def test_ends_have_their_owners(tmp_path, containers, arguments, agent, status, owner, text):
    """The end of a program is the agent's, a workspace without it the infrastructure's."""
    write_inside(tmp_path, *arguments, agent={**agent, "workspace": containers})
    roll_out(tmp_path)

    (episode,) = read_episodes(tmp_path)
    assert str(episode.status) == status, episode.fault
    assert (episode.fault.owner if episode.fault else None) == owner
    assert text in (episode.fault.message if episode.fault else "")


def test_keys_are_not_on_command_lines(tmp_path, containers):
    """Every user of the machine can read these, and the key of a session must stay with its program."""
    write_inside(tmp_path, "hang", agent={"workspace": containers})
    driver = start_rollout(tmp_path, "run.yaml", "--out", "out")
    wait_until(lambda: len(list_marked("agent.py\0hang")) >= 3, (tmp_path / "log").read_text)

    found = list_marked("OPENAI_API_KEY=")

    driver.send_signal(signal.SIGINT)
    driver.wait(120)
    assert found == []


def test_the_next_run_removes_what_a_killed_driver_left(tmp_path, containers):
    """Containers outlive a driver that is killed; a run, or `turnwise workspaces reap`, removes them."""
    write_inside(tmp_path, "hang", num_tasks=2, agent={"workspace": containers})
    driver = start_rollout(tmp_path, "run.yaml", "--out", "out")
    log = (tmp_path / "log").read_text
    wait_until(lambda: len(list_marked("agent.py\0hang")) >= 6, log)

    driver.kill()
    driver.wait()
    write_inside(tmp_path / "again", "converse", agent={"workspace": containers})
    code, text = roll_out(tmp_path / "again")

    assert code == 0, text
    assert "removed workspaces of processes that are gone" in text
    wait_until(lambda: not list_marked("agent.py\0hang"), log)
