"""Outside programs that show the model pictures, with the libraries of the vendors, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from picture_rollouts import CAT, DOG, PLUGINS, roll_out, write_run

from turnwise.media import picture_part
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import environment_of

GATEWAY_TESTS = Path(__file__).parents[1] / "plugins/gateway/tests"
PROGRAM = GATEWAY_TESTS / "programs/show_pictures.py"
DIALECTS = ("chat", "messages", "responses")

pytestmark = pytest.mark.usefixtures("starts_a_process")


def write_program_run(folder: Path, dialect: str, **more: object) -> Path:
    """
    Write a run of the program.

    `hostile` is a folder of files, `server` the host of its pictures, and the other values are sections of the config.
    """
    environment = {"CAT": str(folder / "images/cat.png"), "DOG": str(folder / "dog.jpg")}
    if "hostile" in more:
        environment |= {"HOSTILE": str(more.pop("hostile")), "ANSWERS": str(folder / "answers.json")}
    if "server" in more:
        environment["SERVER"] = f"http://{more['server']}"
    agent = {
        "name": "external",
        "command": ["python", str(PROGRAM), dialect],
        "environment": environment,
        "keep_requests": str(folder / "requests"),
    }
    if "server" in more:
        agent["picture_hosts"] = [more.pop("server")]
    sections = {"rollout": {"n": 1, "prompt_length": 2048, "response_length": 512}, "reward": "reported", **more}
    plugins = [*PLUGINS, "gateway", "reported_reward"]
    return write_run(folder, agent=agent, tools=[], plugins=plugins, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_program_shows_pictures(tmp_path, dialect):
    """The engine gets them at their placeholders, one record has both, and a replay of the requests agrees."""
    file = write_program_run(tmp_path, dialect)
    done = roll_out(tmp_path, file)
    assert done.returncode == 0, done.stderr

    results = read_results(tmp_path / "out")
    assert ["completed"] * 2 == [str(each.status) for each in results], [each.fault for each in results]
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for result in results:
        (record,) = result.trajectories
        assert 2 == len(record.turns())
        places = [[each.start, each.num_tokens, each.picture.key] for each in record.pictures]
        assert [CAT.key, DOG.key] == [key for _start, _num, key in places]
        pad = record.input_ids[places[0][0]]
        assert sum(num for _start, num, _key in places) == (record.input_ids == pad).sum()
        assert all((record.input_ids[start : start + num] == pad).all() for start, num, _key in places)
        assert places in [each["places"] for each in requests]
        assert [[picture_part(CAT)], [picture_part(DOG)]] == [
            [part for part in message["content"] if part["type"] == "image_url"]
            for message in result.messages
            if isinstance(message["content"], list)
        ]
    command = [sys.executable, "-m", "turnwise.cli", "gateway", "replay", str(tmp_path / "requests"), "--json"]
    replayed = subprocess.run(
        [*command, "--config", str(file)],
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    sessions = json.loads(replayed.stdout)["sessions"]
    assert [None, None] == [each["difference"] for each in sessions], replayed.stdout
    assert 0 == replayed.returncode


@pytest.fixture
def server(tmp_path):
    """A server of a folder of pictures, which are named by their hashes, and the paths that it was asked for."""
    folder, asked = tmp_path / "served", []
    folder.mkdir()
    for each in (CAT, DOG):
        (folder / each.key).write_bytes(each.data)

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_arguments):
            asked.append(self.path)

    running = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"127.0.0.1:{running.server_port}", asked
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_program_names_pictures_of_a_server(tmp_path, monkeypatch, server, dialect):
    """Each session fetches a picture once, and its record and the results have the bytes."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    host, asked = server
    done = roll_out(tmp_path, write_program_run(tmp_path, dialect, server=host))
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert ["completed"] * 2 == [str(each.status) for each in results], [each.fault for each in results]
    for result in results:
        (record,) = result.trajectories
        assert [CAT.data, DOG.data] == [each.picture.data for each in record.pictures]
    assert sorted([f"/{CAT.key}", f"/{DOG.key}"] * 2) == sorted(asked)
    assert {CAT.file_name, DOG.file_name} == {file.name for file in (tmp_path / "out" / "media").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_hostile_files(tmp_path, dialect):
    """Each has one line with status 400: the program, the file of requests, the metrics and the log have it."""
    sys.path.insert(0, str(GATEWAY_TESTS))
    from picture_requests import HOSTILE

    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name, (make, _reason) in HOSTILE.items():
        (hostile / name).write_bytes(make())
    file = write_program_run(tmp_path, dialect, hostile=hostile, telemetry={"log_level": "info"})
    done = roll_out(tmp_path, file, "data.limit=1")
    assert done.returncode == 0, done.stderr

    answers = json.loads((tmp_path / "answers.json").read_text())
    assert HOSTILE.keys() == answers.keys()
    for name, (status, text) in answers.items():
        assert (400, True) == (status, HOSTILE[name][1] in text), (name, text)
        assert "\n" not in text
    (result,) = read_results(tmp_path / "out")
    assert ("completed", 1) == (str(result.status), len(result.trajectories))
    assert len(HOSTILE) == result.metrics.extra["gateway/refused_invalid"]
    assert len(HOSTILE) == (done.stdout + done.stderr).count("cannot be used: ")
    (requests,) = (tmp_path / "requests").iterdir()
    events = [json.loads(line) for line in requests.read_text().splitlines()[1:]]
    refused = [event for event in events if event["event"] == "refused"]
    assert len(HOSTILE) == len(refused)
    assert all(event["kind"] == "invalid" and "content[1]" in event["param"] for event in refused)


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_without_pictures(tmp_path, dialect):
    """The fault of the episode has the reason."""
    engine = {"name": "seeing", "pictures": False}
    file = write_program_run(tmp_path, dialect, engine=engine)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    roll_out(tmp_path, file)

    (result,) = read_results(tmp_path / "out")
    assert ("failed", "agent") == (str(result.status), result.fault.owner)
    assert "and the model reads text only" in result.fault.message


@pytest.mark.slow
def test_the_limit_of_pictures(tmp_path):
    """A program that ends at the limit has an episode that was cut there."""
    done = roll_out(tmp_path, write_program_run(tmp_path, "chat"), "rollout.max_pictures=1")
    assert done.returncode == 0, done.stderr

    for result in read_results(tmp_path / "out"):
        assert ("truncated", "rollout.max_pictures", 1) == (str(result.status), result.limit.name, result.limit.value)
        assert "the conversation has 2 pictures, more than rollout.max_pictures=1" == result.limit.reason
        assert [CAT.key] == [place.picture.key for place in result.trajectories[0].pictures]
