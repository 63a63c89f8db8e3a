"""Every sort of refusal, in every dialect, is seen in all the places where somebody looks for it, by real processes."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from gateway_processes import Served, run_turnwise, send, serve, write_run

from turnwise import Status
from turnwise_gateway.replay.request_file import read_requests
from turnwise_result_files import read_results

pytestmark = pytest.mark.usefixtures("starts_a_process")

USER, SYSTEM = {"role": "user", "content": "Hello?"}, {"role": "system", "content": "Be short."}
DIALECTS = {
    "chat": ("/v1/chat/completions", "messages", "stop"),
    "messages": ("/v1/messages", "messages", "stop_sequences"),
    "responses": ("/v1/responses", "input", None),
}
"""Path, name of the list of messages, and name of the stop strings of each dialect."""


@frozen(kw_only=True)
class Refusal:
    """
    Requests of a session, the last of which has a refusal that the test looks for.

    Attributes:
        body: of the requests.
        kind: of the refusal.
        status: of the response.
        param: field that the refusal names; None for none.
        reason: words of its sentence.
        fault: words of the fault; those of the sentence if it has none.
        num_before: requests before it that are refused because of a field.
        headers: of the requests.
    """

    body: bytes
    kind: str
    status: int = 400
    param: str | None = None
    reason: str
    fault: str = ""
    num_before: int = 0
    headers: Mapping[str, str] = field(factory=dict)


def list_refusals(dialect: str) -> dict[str, Refusal]:
    """Return a refusal of each sort in a dialect."""
    _, key, stop = DIALECTS[dialect]

    def body(*messages: Any, **more: Any) -> bytes:
        limit = {"max_tokens": 9} if dialect == "messages" else {}
        return json.dumps({"model": "policy", key: messages or [USER], **limit, **more}).encode()

    wrong = Refusal(body=body(n=2), kind="unsupported", param="n", reason="'n' is not supported")
    found = {
        "field": wrong,
        "no JSON": Refusal(body=b'{"model": ', kind="invalid", reason="JSON"),
        "no UTF-8": Refusal(body=b'{"model": "\xff"}', kind="invalid", reason="UTF-8"),
        "compressed": Refusal(
            body=b"\x1f\x8b", kind="encoded", status=415, reason="compressed", headers={"Content-Encoding": "gzip"}
        ),
        "size": Refusal(
            body=body({"role": "user", "content": "x" * 3_000_000}), kind="context_length_exceeded", reason="bytes"
        ),
        "session": Refusal(body=body(USER, SYSTEM), kind="invalid", param="messages[1]", reason="mid_system"),
        "chat": Refusal(
            body=body({"role": "user", "content": "a <|im_end|> b"}),
            kind="invalid",
            param="messages",
            reason="a message spells the special token '<|im_end|>'",
        ),
        "context": Refusal(
            body=body({"role": "user", "content": "long " * 500}), kind="context_length_exceeded", reason="tokens"
        ),
        "budget": Refusal(
            body=body(), kind="budget_exhausted", reason="has made its 5 calls", num_before=5, fault=wrong.reason
        ),
    }
    if stop is not None:
        found["engine"] = Refusal(
            body=body(**{stop: ["x"]}), kind="unsupported", param=stop, reason=f"'{stop}' is not supported: the engine"
        )
    return found


CASES = [(dialect, name) for dialect in DIALECTS for name in list_refusals(dialect)]


def refuse_all(served: Served) -> dict[tuple[str, str], dict[str, Any]]:
    """Let each refusal happen in a separate session; return the session as the control port shows it after its end."""
    shown = {}
    for dialect, name in CASES:
        session, refusal = served.open(), list_refusals(dialect)[name]
        url, key = session["anthropic_base_url"] + DIALECTS[dialect][0], session["api_key"]
        for each in [*[list_refusals(dialect)["field"]] * refusal.num_before, refusal]:
            status, reply = send("POST", url, each.body, key, each.headers)
            assert each.status == status, (dialect, name, reply)
        shown[dialect, name] = served.control("DELETE", f"/sessions/{session['id']}")
    return shown


@pytest.mark.slow
def test_a_refusal_is_seen_everywhere(tmp_path: Path) -> None:
    """The log line, the file of requests, the fault and the metrics have it, and a replay refuses the same."""
    config, out = write_run(tmp_path, mid_system="refuse"), tmp_path / "out"
    config.write_text(config.read_text() + "chat: {name: jinja, special_tokens_in_content: refuse}\n")
    options = ("telemetry.log_level=info", "telemetry.log_format=json", "--out", out, "--keep-requests")
    with serve(tmp_path, config, *options) as served:
        shown = refuse_all(served)
        code, _output, errors = served.stop(signal.SIGTERM)
    assert 0 == code, errors
    results = {result.uid: result for result in read_results(out)}
    lines = [json.loads(line) for line in errors.splitlines()]
    replay = run_turnwise(tmp_path, "gateway", "replay", out, "--json")

    for case in CASES:
        refusal, session = list_refusals(case[0])[case[1]], shown[case]
        result = results[session["episode"]["uid"]]
        fault, name, num_calls = result.fault, session["session_id"], 1 + refusal.num_before
        assert (Status.FAILED, True) == (result.status, fault is not None), case
        assert fault.message.startswith("no call was served; the last one was refused: ") or "context" == case[1], case
        assert (refusal.fault or refusal.reason) in fault.message, (case, fault)
        assert result.metrics.extra[f"gateway/refused_{refusal.kind}"] >= 1, case
        assert result.metrics.extra["gateway/calls"] == num_calls, case
        logged = [line for line in lines if line.get("session") == name and line["status"] == refusal.status]
        assert {(refusal.kind, refusal.param)} <= {(line["outcome"], line["field"]) for line in logged}, case
        assert any(refusal.reason in line["reason"] for line in logged), case
        events = read_requests(out / f"requests/{name}.jsonl").events
        assert ["call", "refused"] * num_calls == [event["event"] for event in events], case
        refused = [(each["kind"], each["param"]) for each in events if each["event"] == "refused"]
        assert (refusal.kind, refusal.param) in refused, case
        assert any(refusal.reason in each.get("message", "") for each in events), case
    check_bodies(out, shown)
    sessions = json.loads(replay.stdout)["sessions"]
    assert [None] * len(CASES) == [each["difference"] for each in sessions], replay.stdout
    assert 0 == replay.returncode


def check_bodies(out: Path, shown: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Every body is kept as it came, unless it was too large to be read."""
    for dialect, name in product(DIALECTS, ("field", "no JSON", "no UTF-8", "size")):
        (call, _) = read_requests(out / f"requests/{shown[dialect, name]['session_id']}.jsonl").events
        kept = base64.b64decode(call["base64"]) if "base64" in call else call["body"]
        sent = list_refusals(dialect)[name].body
        expected = sent if name == "no UTF-8" else None if name == "size" else sent.decode()
        assert expected == kept, (dialect, name)
