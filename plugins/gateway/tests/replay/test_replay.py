"""The requests of a session against a fresh gateway give the same records."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from gateway_processes import Served, chat, converse, leave, open_gate, run_turnwise, send, serve, write_run
from session_scenarios import Sessions, make_call, user

from turnwise.errors import DataError
from turnwise_gateway.replay.replayed_session import find_difference
from turnwise_gateway.replay.request_file import FORMAT, log_session, read_requests
from turnwise_result_files import read_results

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


CAPABILITIES = {"logprobs": True, "seeds": True, "stop_strings": True, "abort": True}
CAPABILITIES |= {"max_context": None, "vocab_size": None}


def wander(served: Served) -> None:
    """Continue, repeat, go back, call twice at once and leave; then end the session."""
    session = served.open(uid="t1")
    messages = converse(session, 3)
    chat(session, messages[:3])
    chat(session, [*messages[:2], {"role": "user", "content": "Another way."}])
    both = [
        threading.Thread(target=chat, args=(session, [*messages, {"role": "user", "content": text}])) for text in "ab"
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    leave(session, [{"role": "user", "content": "long " * 40}])
    changed = [*messages[:1], {"role": "assistant", "content": "I said so."}, {"role": "user", "content": "Did you?"}]
    chat(session, changed)
    chat(session, [*changed, {"role": "user", "content": "x"}], 400)  # the sixth call and more: the budget is spent
    served.control("DELETE", f"/sessions/{session['id']}")


def edit(file: Path, changed: Path, change: Any) -> None:
    """Write a file of requests with one event changed."""
    head, *events = map(json.loads, file.read_text().splitlines())
    change(events)
    changed.write_text("".join(json.dumps(each) + "\n" for each in [head, *events]))


@pytest.mark.slow
def test_a_replay_gives_the_same_records(tmp_path: Path) -> None:
    """Every way to call is replayed equally; a changed request, token or record is a difference with exit code 1."""
    config = write_run(tmp_path)
    config.write_text(config.read_text().replace("max_calls: 5", "max_calls: 9"))
    out = tmp_path / "out"
    with serve(tmp_path, config, "--out", out, "--keep-requests") as served:
        wander(served)
        served.open()
        converse(served.open(), 1)
        assert served.stop()[0] == 0
    file = max((out / "requests").glob("*.jsonl"), key=lambda path: path.stat().st_size)
    events = {event["event"] for event in read_requests(file).events}
    assert {"call", "answer", "delivered", "left", "refused"} <= events

    done = run_turnwise(tmp_path, "gateway", "replay", out, "--json")

    sessions = json.loads(done.stdout)["sessions"]
    assert [None, None, None] == [each["difference"] for each in sessions], done.stdout
    assert (0, True) == (done.returncode, all(each["is_whole"] for each in sessions))
    assert [0, 1, 10] == sorted(each["num_calls"] for each in sessions)

    def change_text(events: list[dict[str, Any]]) -> None:
        events[0]["body"] = events[0]["body"].replace("Hello", "Hullo")

    def change_mask(events: list[dict[str, Any]]) -> None:
        events[-1]["records"][0]["token_ids"][2] += 1

    changed = tmp_path / "changed.jsonl"
    edit(file, changed, change_mask)
    masked = run_turnwise(tmp_path, "gateway", "replay", changed, "--config", config)
    assert (1, True) == (masked.returncode, "record 0: token_ids at 2: recorded" in masked.stdout), masked.stdout
    edit(file, changed, change_text)
    other = run_turnwise(tmp_path, "gateway", "replay", changed, "--config", config)
    assert (1, True) == (other.returncode, "call 0: it never ends as recorded" in other.stdout), other.stdout


@pytest.mark.slow
def test_a_replay_finishes_left_calls(tmp_path: Path) -> None:
    """A retry that gets the turn of a left call, an equal call beside it, and left calls that no retry fetches."""
    config = write_run(tmp_path, finish_left_calls=True)
    config.write_text(config.read_text().replace("max_calls: 5", "max_calls: 9"))
    out = tmp_path / "out"
    with serve(tmp_path, config, "--out", out, "--keep-requests") as served:
        session = served.open(uid="t1")
        messages = [{"role": "user", "content": "middle " * 15}]
        leave(session, messages)
        leave(session, messages)
        leave(session, [{"role": "user", "content": "long " * 40}])
        open_gate(tmp_path)
        chat(session, messages)
        body = json.dumps({"model": session["model"], "messages": messages}).encode()
        url = f"{session['openai_base_url']}/chat/completions"
        status, reply = send("POST", url, body, session["api_key"], {"X-Stainless-Retry-Count": "1"})
        assert 200 == status
        chat(session, [*messages, reply["choices"][0]["message"], {"role": "user", "content": "And?"}])
        served.control("DELETE", f"/sessions/{session['id']}")
        assert served.stop()[0] == 0
    (file,) = (out / "requests").glob("*.jsonl")
    events = read_requests(file).events
    assert [0, 1, 2] == [event["call"] for event in events if event["event"] == "kept"]
    assert [3, 0, 5] == [event["sampled_for"] for event in events if "result" in event]
    (result,) = read_results(out / "trajectories.parquet")
    counts = {name: result.metrics.extra[f"gateway/{name}"] for name in ("joined", "left_calls", "left_tokens")}
    assert {"joined": 1, "left_calls": 2, "left_tokens": 4} == counts

    done = run_turnwise(tmp_path, "gateway", "replay", out, "--json")

    assert [None] == [each["difference"] for each in json.loads(done.stdout)["sessions"]], done.stdout
    assert 0 == done.returncode


def test_the_first_difference_is_named() -> None:
    """The ids come before everything else, and a missing record before them."""
    first = {"token_ids": [1, 2, 3], "lineage": None}
    other = {"token_ids": [1, 2, 4], "lineage": {"kind": "main"}}

    assert find_difference([first], [first]) is None
    assert "record 0: token_ids at 2: recorded 3, replayed 4" == find_difference([first], [other])
    assert "at 3: recorded nothing, replayed 4" in str(find_difference([first], [{**first, "token_ids": [1, 2, 3, 4]}]))
    assert "recorded 1 records, replayed 2" == find_difference([first], [first, other])
    columns = [{"open_columns": [[{"name": "rank"}, {"data": letter * 10_000}]]} for letter in "AB"]
    assert len(find_difference(columns[:1], columns[1:]) or "") < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a file with the requests"),
        ("{}", "not a file with the requests"),
        (f'{{"format": "{FORMAT}", "version": 99}}', "version 99"),
        (f'{{"format": "{FORMAT}", "version": 2}}', "cannot be read"),
        ("no json", "cannot be read"),
    ],
)
def test_other_files_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    """One line says why."""
    file = tmp_path / "requests.jsonl"
    file.write_text(text)

    with pytest.raises(DataError, match=expected):
        read_requests(file)


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """The process was killed while it wrote it."""
    head = {
        "format": FORMAT,
        "version": 2,
        "session": "s",
        "capabilities": CAPABILITIES,
        "task": {"messages": [], "uid": "t"},
        "rollout_n": 0,
    }
    head |= {"global_step": 0, "validation": False}
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(head) + '\n{"event": "left", "call": 0}\n{"event": "le')

    found = read_requests(file)

    assert ({"event": "left", "call": 0},) == found.events
    assert found.records is None


def test_the_file_has_the_news_of_each_answer(tmp_path: Path) -> None:
    """A lost response and a turn that a score names are in the file, so that a replay does the same."""

    async def scenario(session: Any) -> None:
        log_session(session, tmp_path)
        lost = await session.answer(make_call(user("One?")))
        lost.confirm()
        lost.lose()
        read = await session.answer(make_call(user("Two?")))
        assert session.deliver(read.reply.id)
        assert 2 == len(session.transcript)
        read.release()

    Sessions().run(scenario)

    events = [(event["event"], event["call"]) for event in read_requests(tmp_path / "session.jsonl").events]
    news = [("delivered", 0), ("lost", 0), ("call", 1), ("answer", 1), ("read", 1), ("released", 1)]
    assert [("call", 0), ("answer", 0), *news] == events
