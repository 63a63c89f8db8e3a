"""`turnwise gateway serve` as a process: sessions over the control port become episodes in its folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from gateway_processes import Served, chat, converse, run_turnwise, serve, write_run

from turnwise import EpisodeResult, Status
from turnwise_result_files import read_results

pytestmark = pytest.mark.usefixtures("starts_a_process")


def read(out: Path) -> dict[str, EpisodeResult]:
    return {result.uid: result for result in read_results(out)}


def sampled(result: EpisodeResult) -> list[list[int]]:
    return [record.response_ids[record.response_mask == 1].tolist() for record in result.trajectories]


def check_sessions(served: Served) -> list[int]:
    """Open, use, read and end sessions of each kind; return the tokens of the first one."""
    first = served.open(uid="t1")
    converse(first)
    shown = served.control("GET", f"/sessions/{first['id']}", key=first["control_key"])
    turns = shown["records"]["0"]
    assert [2, None, "main"] == [len(turns), shown["episode"], shown["lineage"][0]["kind"]]
    exported = served.control("GET", f"/sessions/{first['id']}?format=atif", key=first["control_key"])
    assert 2 == sum(step["source"] == "agent" for step in exported["steps"])
    served.control("POST", f"/sessions/{first['id']}/score", {"id": "a", "score": 0.75})
    ended = served.control("DELETE", f"/sessions/{first['id']}", key=first["control_key"])
    assert ("completed", 0.75) == (ended["episode"]["status"], ended["episode"]["reward"])
    assert "over" in chat(first, [{"role": "user", "content": "Still there?"}], 400)["message"]

    own = served.control(
        "POST", "/sessions", {"task": {"messages": [{"role": "user", "content": "Mine"}], "ground_truth": "secret"}}
    )
    assert "ground_truth" not in own["task"]
    converse(own["session"])
    converse(own["session"], question="Another one?")
    served.control("POST", f"/sessions/{own['session']['id']}/fail", {"reason": "no idea"})
    failed = served.control("DELETE", f"/sessions/{own['session']['id']}")
    assert ("failed", "agent") == (failed["episode"]["status"], failed["episode"]["fault"]["owner"])

    long = served.open()
    assert "tokens" in chat(long, [{"role": "user", "content": "long " * 500}], 400)["message"]
    too_long = served.control("DELETE", f"/sessions/{long['id']}")
    assert ("failed", "data") == (too_long["episode"]["status"], too_long["episode"]["fault"]["owner"])
    return [token for turn in turns for token in turn["completion_token_ids"]]


def check_refusals(served: Served, other: dict[str, str]) -> None:
    """Keys open their own session alone, and wrong requests say what is wrong."""
    mine = served.open()
    served.control("GET", f"/sessions/{mine['id']}", key=other["control_key"], status=401)
    served.control("GET", f"/sessions/{mine['id']}", key=mine["api_key"], status=401)
    served.control("POST", "/sessions", {}, key=mine["control_key"], status=401)
    assert "no row" in served.control("POST", "/sessions", {"uid": "t9"}, status=404)["error"]["message"]
    assert "unknown field" in served.control("POST", "/sessions", {"rwo": 1}, status=400)["error"]["message"]
    assert "no row" in served.control("POST", "/sessions", {"task": {"messages": []}}, status=400)["error"]["message"]
    other = {"messages": [{"role": "user", "content": "Mine"}], "agent_name": "tool_agent"}
    assert "agent_name" in served.control("POST", "/sessions", {"task": other}, status=400)["error"]["message"]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    picture = {"messages": [{"role": "user", "content": [image]}]}
    assert "data: URLs" in served.control("POST", "/sessions", {"task": picture}, status=400)["error"]["message"]
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Mine"}]}]}
    served.control("POST", "/sessions", {"task": parts})
    assert "3 sessions" in served.control("POST", "/sessions", {}, status=429)["error"]["message"]


@pytest.mark.slow
def test_sessions_become_episodes(tmp_path: Path) -> None:
    """Ended sessions are completed or failed episodes, and the ones that Ctrl-C ends are aborted with their turns."""
    options = ("--out", tmp_path / "out", "--print-keys", "chat={name: jinja, check_every: 1}")
    with serve(tmp_path, write_run(tmp_path), *options) as served:
        assert served.access["secret"] in served.lines[-1]
        tokens = check_sessions(served)
        left = served.open()
        converse(left, 1)
        check_refusals(served, left)
        code, output, errors = served.stop()

    assert (0, False) == (code, "Traceback" in errors), errors
    assert "4 episodes" in output  # the others never called the model
    results = read(tmp_path / "out")
    done, mine, aborted = (
        results["t1/0"],
        next(r for r in results.values() if r.task.ground_truth),
        results["session/1"],
    )
    assert [tokens] == sampled(done)
    assert (Status.COMPLETED, 0.75) == (done.status, done.reward)
    assert 1 == done.metrics.extra["template/compared_conversations"]
    assert Status.FAILED is mine.status
    assert 2 == mine.metrics.extra["template/compared_conversations"]
    assert (Status.ABORTED, 1) == (aborted.status, len(aborted.trajectories[0].turns()))
    assert not (tmp_path / "out/control.json").exists()


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_each_line_of_a_served_log_is_json(tmp_path: Path, how: signal.Signals) -> None:
    """From the start to the line about the signal, which ends the sessions as Ctrl-C does."""
    with serve(tmp_path, write_run(tmp_path), "telemetry.log_format=json", "--out", tmp_path / "out") as served:
        converse(served.open(uid="t1"), 1)
        code, _output, errors = served.stop(how)

    assert 0 == code, errors
    events = [json.loads(line)["event"] for line in errors.splitlines()]
    assert any("ending the sessions" in event for event in events)
    assert ["t1/0"] == list(read(tmp_path / "out"))


@pytest.mark.slow
def test_a_killed_gateway_is_resumed(tmp_path: Path) -> None:
    """Episodes that ended before a kill are kept; new sessions of a task continue its count."""
    with serve(tmp_path, write_run(tmp_path), "--out", tmp_path / "out") as served:
        session = served.open(uid="t1")
        converse(session)
        served.control("DELETE", f"/sessions/{session['id']}")
        converse(served.open(uid="t2"), 1)
        served.stop(signal.SIGKILL)
    before = read(tmp_path / "out")
    again = run_turnwise(tmp_path, "gateway", "serve", tmp_path / "run.yaml", "--out", tmp_path / "out")
    with serve(tmp_path, "--resume", tmp_path / "out") as served:
        session = served.open(uid="t1")
        converse(session)
        served.control("DELETE", f"/sessions/{session['id']}")
        code, _output, errors = served.stop(signal.SIGTERM)

    assert ["t1/0"] == list(before)
    assert (2, True) == (again.returncode, "--overwrite" in again.stderr)
    assert 0 == code, errors
    results = read(tmp_path / "out")
    assert ["t1/0", "t2/0", "t1/1"] == list(results)
    assert sampled(before["t1/0"]) == sampled(results["t1/0"])
    assert Status.COMPLETED is results["t1/1"].status


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give a config and --out DIR"),
        (["--resume", "out"], "holds no run"),
        (["missing.yaml", "--out", "out"], "missing.yaml"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, and exit code 2."""
    from turnwise.cli import main

    monkeypatch.chdir(tmp_path)

    assert 2 == main(["gateway", "serve", *arguments])
    error = capsys.readouterr().err
    assert expected in error
    assert 1 == len(error.splitlines())
