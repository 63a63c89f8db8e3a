"""Sessions that are open when `turnwise gateway serve` is killed become aborted episodes when it is resumed."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from gateway_processes import Served, chat, converse, send, serve, write_run

from turnwise import EpisodeResult, Status
from turnwise_gateway.serving.session_log import SESSIONS_FILE, SessionLog
from turnwise_result_files import read_results

pytestmark = pytest.mark.usefixtures("starts_a_process")


def use(served: Served) -> list[dict[str, Any]]:
    """Open sessions in each state: ended, two conversations, one refused call, and none; return them."""
    ended = served.open(uid="t1")
    converse(ended)
    served.control("DELETE", f"/sessions/{ended['id']}")
    talking = served.open(uid="t1")
    converse(talking)
    converse(talking, 1, "Another one?")
    refused = served.open(uid="t2")
    chat(refused, [{"role": "user", "content": "long " * 500}], 400)
    return [ended, talking, refused, served.open()]


def read(out: Path) -> dict[str, EpisodeResult]:
    return {result.uid: result for result in read_results(out)}


def turns_of(result: EpisodeResult) -> list[list[int]]:
    return [record.input_ids.tolist() for record in result.trajectories]


def call(served: Served, session: dict[str, Any], key: str, *, in_path: bool) -> tuple[int, Any]:
    """Call the resumed gateway with a key of an earlier process; return the status and the code of the error."""
    place = f"/s/{session['id']}" if in_path else ""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hello?"}]}).encode()
    status, reply = send("POST", f"{served.access['agents_url']}{place}/v1/chat/completions", body, key)
    return status, reply["error"]["code"]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_open_sessions_are_aborted_episodes(tmp_path: Path, keeps: bool) -> None:
    """They have their turns if the requests were kept, calls with their keys are told so, and one line says it once."""
    out = tmp_path / "out"
    kept = ["--keep-requests"] if keeps else []
    with serve(tmp_path, write_run(tmp_path), "--out", out, *kept) as served:
        sessions = use(served)
        shown = served.control("GET", f"/sessions/{sessions[1]['id']}")
        served.stop(signal.SIGKILL)
    with serve(tmp_path, "--resume", out, *kept) as served:
        answers = {call(served, each, each["api_key"], in_path=where) for each in sessions for where in (True, False)}
        foreign = call(served, sessions[1], sessions[2]["api_key"], in_path=True)
        unknown = call(served, sessions[1], "no key of anybody", in_path=False)
        new = served.open(uid="t1")
        converse(new)
        served.control("DELETE", f"/sessions/{new['id']}")
        code, _output, errors = served.stop(signal.SIGTERM)
    with serve(tmp_path, "--resume", out, *kept) as again:
        assert 0 == again.stop(signal.SIGTERM)[0]

    assert (0, {(400, "session_closed")}) == (code, answers), errors
    assert [(401, "invalid_api_key")] * 2 == [foreign, unknown]
    assert "3 sessions that were open at a kill, as aborted episodes" in served.lines[0]
    assert "open at a kill" not in "".join(again.lines)
    results = read(out)
    assert ["t1/0", "t1/1", "t2/0", "session/0", "t1/2"] == list(results)
    lost = [results[uid] for uid in ("t1/1", "t2/0", "session/0")]
    assert {(Status.ABORTED, "infra")} == {(each.status, each.fault and each.fault.owner) for each in lost}
    assert [2 if keeps else 0, 0, 0] == [len(each.trajectories) for each in lost]
    told = [bool(each.fault and "--keep-requests was not given" in each.fault.message) for each in lost]
    assert [not keeps] * 3 == told
    if keeps:
        tokens = [turn["completion_token_ids"] for record in shown["records"].values() for turn in record]
        restored = lost[0].trajectories
        spans = [record.input_ids[start:end].tolist() for record in restored for start, end in record.turns()]
        assert tokens == spans
        assert [True, True] == [bool((record.response_mask == 1).any()) for record in restored]
    assert {Status.COMPLETED} == {results["t1/0"].status, results["t1/2"].status}
    assert 0o600 == stat.S_IMODE(os.stat(out / SESSIONS_FILE).st_mode)


@pytest.mark.slow
def test_a_changed_config_restores_what_it_can(tmp_path: Path) -> None:
    """A request file whose turns fit no longer gives an aborted episode that says so, and the gateway serves."""
    out = tmp_path / "out"
    with serve(tmp_path, write_run(tmp_path), "--out", out, "--keep-requests") as served:
        session = served.open(uid="t1")
        converse(session)
        served.stop(signal.SIGKILL)
    file = out / f"requests/{session['id']}.jsonl"
    lines = file.read_text().splitlines()
    assert "delivered" in lines[3]
    file.write_text("\n".join([*lines[:4], lines[4].replace("Hello", "Hullo"), *lines[5:]]) + "\n")
    with serve(tmp_path, "--resume", out) as served:
        assert 0 == served.stop(signal.SIGTERM)[0]

    (result,) = read(out).values()
    assert Status.ABORTED is result.status
    assert result.fault is not None
    assert "its later turns cannot be restored: call 1" in result.fault.message
    assert 1 == len(result.trajectories[0].turns())


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """The process was killed while it wrote it: nobody has the key of that session."""
    line = {"opened": "s", "key": "00", "task": {"messages": [], "uid": "t"}, "rollout_n": 2}
    file = tmp_path / SESSIONS_FILE
    file.write_text(json.dumps(line | {"global_step": 0, "validation": False}) + '\n{"ended": "s"}\n{"opened": "r')

    (found,) = SessionLog(file).read()

    assert ("s", "t/2", True) == (found.name, found.uid, found.is_over)
