"""`turnwise gateway serve` with several models, one of them behind another gateway, as a frozen judge would be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict
from gateway_processes import chat, converse, run_turnwise, serve, write_run

from turnwise.record.outside_call import OutsideCall
from turnwise_result_files import read_results
from turnwise_result_files.outside_calls import read_answer, read_messages

pytestmark = pytest.mark.usefixtures("starts_a_process")
KEY = "JUDGE_KEY_OF_THE_TEST"


def ask_in_each_dialect(session: dict[str, Any], question: str) -> list[str]:
    """Ask the judge with the vendors' libraries, plainly and in streams; return the texts."""
    import anthropic
    import openai

    key, url, model = session["api_key"], session["openai_base_url"], "judge"
    messages: list[Any] = [{"role": "user", "content": question}]
    texts = []
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        texts.append(client.chat.completions.create(model=model, messages=messages).choices[0].message.content)
        with client.chat.completions.stream(model=model, messages=messages) as stream:
            texts.append(stream.get_final_completion().choices[0].message.content)
        texts.append(client.responses.create(model=model, input=question).output_text)
        with client.responses.stream(model=model, input=question) as events:
            texts.append(events.get_final_response().output_text)
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as sdk:
        asked: Any = {"model": model, "messages": messages, "max_tokens": 99}
        texts.append(sdk.messages.create(**asked).content[0].text)
        with sdk.messages.stream(**asked) as parts:
            texts.append(parts.get_final_text())
        assert sdk.messages.count_tokens(model=model, messages=messages).input_tokens > 0
    return [text or "" for text in texts]


def check_outside_calls(calls: Sequence[OutsideCall], texts: list[str]) -> None:
    """Six calls have the texts as answers, of three APIs plainly and in streams; the last one counts tokens."""
    assert texts == [read_answer(call) for call in calls[:-1]]
    assert "input_tokens" in read_answer(calls[-1])
    for call in calls:
        assert ("judge", 200, 4) == (call.model, call.status, call.num_turns)
        assert [{"role": "user", "content": "Is it right?"}] == read_messages(call)


def check_exports(folder: Path, shown: Sequence[Any], texts: list[str]) -> None:
    """The session as JSON and in ATIF has the calls, and so has the finished episode in ATIF."""
    (result,) = read_results(folder / "out")
    plain, live = shown
    assert [asdict(call) for call in result.outside_calls] == plain["outside_calls"]
    converted = run_turnwise(folder, "convert", folder / "out", "--to", "atif", "--out", folder / "atif.jsonl")
    assert 0 == converted.returncode, converted.stderr
    for exported in (live, json.loads((folder / "atif.jsonl").read_text())):
        asked = [each for each in exported["subagent_trajectories"] if each["agent"]["name"] == "judge"]
        assert texts == [each["steps"][-1]["message"] for each in asked[:-1]]
        assert all(each["extra"]["after_turns"] == 4 and each["steps"][-1]["is_copied_context"] for each in asked)


@pytest.mark.slow
def test_a_judge_behind_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's calls of the judge reach it, are kept with the requests, and enter no record of the run."""
    for name in ("judge", "run"):
        (tmp_path / name).mkdir()
    folder = tmp_path / "run"
    judge_run = write_run(tmp_path / "judge")
    with serve(tmp_path / "judge", judge_run, "agent.max_calls=20", "--out", tmp_path / "judge/out") as other:
        judge = other.open(uid="t1")
        monkeypatch.setenv(KEY, judge["api_key"])
        place = {"base_url": judge["openai_base_url"], "model": "policy", "api_key_env": KEY}
        models = json.dumps({"judge": place, "gpt-4o-mini": "untrained", "o1": "refuse"})
        overrides = ("agent.max_calls=20", f"agent.models={models}")
        options = ("--keep-requests", "--out", folder / "out")
        with serve(folder, write_run(folder), *overrides, *options) as served:
            session = served.open(uid="t1")
            converse(session, 2)
            converse({**session, "model": "gpt-4o-mini"}, 2)
            texts = ask_in_each_dialect(session, "Is it right?")
            assert (
                "option models"
                in chat({**session, "model": "o1"}, [{"role": "user", "content": "Hm?"}], 400)["message"]
            )
            shown = [served.control("GET", f"/sessions/{session['id']}?format={each}") for each in ("json", "atif")]
            served.control("DELETE", f"/sessions/{session['id']}")
            assert 0 == served.stop()[0]
        other.control("DELETE", f"/sessions/{judge['id']}")
        assert 0 == other.stop()[0]

    (judged,) = read_results(tmp_path / "judge/out")
    (result,) = read_results(folder / "out")
    assert 6 == len([turn for record in judged.trajectories for turn in record.turns()])
    assert all(texts)
    assert [("main", "", True), ("auxiliary", "gpt-4o-mini", False)] == [
        (line.kind, line.label, line.trained) for line in result.lineage
    ]
    extra = result.metrics.extra
    assert [7, 0, 1] == [
        extra[f"gateway/{name}"] for name in ("forwarded_calls", "forwarded_failures", "refused_unsupported")
    ]
    check_outside_calls(result.outside_calls, texts)
    check_exports(folder, shown, texts)
    (file,) = (folder / "out/requests").iterdir()
    events = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    forwarded = [event for event in events if event["event"] == "forwarded"]
    assert 7 == len(forwarded)
    assert all("Is it right?" in event["body"] and 200 == event["status"] for event in forwarded)
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and "judge/out" not in str(path)):
        assert judge["api_key"].encode() not in path.read_bytes(), path
    monkeypatch.delenv(KEY)  # a replay calls no other server, so it needs no key
    replayed = run_turnwise(folder, "gateway", "replay", folder / "out")
    assert 0 == replayed.returncode, replayed.stderr + replayed.stdout


@pytest.mark.slow
def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """Before the first session, in one line."""
    models = json.dumps({"judge": {"base_url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}})
    done = run_turnwise(
        tmp_path, "gateway", "serve", write_run(tmp_path), f"agent.models={models}", "--out", tmp_path / "o"
    )

    assert 0 != done.returncode
    assert "agent.models.judge.api_key_env: there is no environment variable 'NO_SUCH_KEY'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.many_cases(1)
@pytest.mark.parametrize(
    ("models", "text"),
    [
        ({"judge": "frozen"}, "policy"),
        ({"judge": {"base_url": "host"}}, "base_url"),
        ({"judge": {}}, "section of keys"),
        ({"policy": "untrained"}, "must be policy"),
    ],
)
def test_wrong_models_are_named(tmp_path: Path, models: object, text: str) -> None:
    """One line names the option."""
    options = (f"agent.models={json.dumps(models)}", "--out", tmp_path / "o")
    done = run_turnwise(tmp_path, "gateway", "serve", write_run(tmp_path), *options)

    assert 0 != done.returncode
    assert "agent.models" in done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
