"""The control ports of `turnwise gateway serve` and of a pool answer requests about sessions in the same way."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from both_ports import PORTS, SessionPort, bearer
from hypothesis import given, settings
from hypothesis import strategies as st


@frozen
class Step:
    """
    A request. Its texts have `ID`, `KEY`, `TURN0` and so on for the names in the session that the port has opened.

    Attributes:
        method: of HTTP.
        path: behind `/sessions`.
        body: as it is sent.
        token: in place of the secret of the port.
    """

    method: str
    path: str
    body: str = ""
    token: str | None = field(default=None, kw_only=True)


def score(**body: Any) -> Step:
    return Step("POST", "/ID/score", json.dumps({"id": "a", "score": 1.0} | body))


def fail(**body: Any) -> Step:
    return Step("POST", "/ID/fail", json.dumps({"reason": "no idea"} | body))


SHOW, ATIF, END, LIST = Step("GET", "/ID"), Step("GET", "/ID?format=atif"), Step("DELETE", "/ID"), Step("GET", "")
UNKNOWN = [
    Step("GET", "/9-9-9"),
    Step("DELETE", "/9-9-9"),
    Step("POST", "/9-9-9/score", '{"id": "a", "score": 1}'),
    Step("POST", "/9-9-9/score", '{"id": 1}'),
    Step("POST", "/9-9-9/fail", "{}"),
    Step("GET", "/9-9-9?format=xml"),
    Step("GET", "/%FF"),
]
MALFORMED = [
    Step(method, path, body)
    for method, path in (("POST", "/ID/score"), ("POST", "/ID/fail"))
    for body in (
        *("", "{", "[]", "null", '"a"', '{"x": 1}', '{"id": "a", "id": "a"}', '{"score": NaN}', '{"score": 1e999}'),
        *('{"id": 1, "score": 1}', '{"id": "", "score": 1}', '{"id": "a"}', '{"id": "a", "score": true}'),
        *('{"id": "a", "score": 1e39}', '{"id": "a", "score": "1"}', '{"id": "a", "score": 1, "turn": -1}'),
        *('{"id": "a", "score": 1, "turn": 1.0}', '{"id": "a", "score": 1, "record": 0, "turn": 0}'),
        *('{"id": "a", "score": 1, "record": "0"}', '{"id": "a", "score": 1, "metrics": {"x": "y"}}'),
        *('{"id": "a", "score": 1, "metrics": [1]}', '{"owner": "me"}', '{"reason": 1}', '{"fence": 1}'),
    )
]
FORMATS = [Step("GET", f"/ID?format={form}") for form in ("json", "atif", "xml", "")]
ROUTES = [SHOW, END, score(), fail(), LIST, Step("GET", "/ID/nothing"), Step("PUT", "/ID"), Step("POST", "/ID")]
TOKENS = [
    Step(each.method, each.path, each.body, token=token)
    for each in ROUTES
    for token in ("", "wrong", "API", "KEY")
    if (each.method, token) != ("DELETE", "KEY") and not (each.method == "POST" and token == "KEY")
]
SCENARIOS = {
    "a whole score": [score(), score(), score(score=0.5), score(id="b"), SHOW, fail(), LIST],
    "scores of turns": [score(turn=0), score(turn="TURN0"), score(id="b", turn=0), score(id="b", turn="TURN1"), SHOW],
    "other kinds of scores": [score(record=0), score(id="b"), score(id="b", turn=0), score(id="b", record=0), END],
    "unknown turns and records": [
        score(turn=2),
        score(turn="t"),
        score(turn=""),
        score(record=1),
        score(record=10**30),
    ],
    "metrics": [score(turn=0, metrics={"x": 3e38}), score(id="b", turn=1, metrics={"x": 3e38}), SHOW],
    "a failure": [fail(), fail(), fail(owner="infra"), score(), END, SHOW, LIST],
    "a failure of the machine": [fail(owner="infra", reason=""), fail(), SHOW, ATIF],
    "an end": [END, END, score(), fail(), SHOW, ATIF, LIST],
    "an end after a score": [score(turn=1), END, score(turn=1), score(id="b", turn=0), fail(), SHOW],
    "an end after the whole score": [score(metrics={"x": 1}), END, score(metrics={"x": 1}), END],
    "unknown sessions": UNKNOWN,
    "malformed bodies": MALFORMED,
    "formats": FORMATS,
    "tokens": TOKENS,
    "the key of the session": [
        Step(each.method, each.path, each.body, token="KEY") for each in (SHOW, score(turn=0), fail(), END, LIST)
    ],
    "other routes": ROUTES[5:],
}
ANY = [*MALFORMED, *FORMATS, *TOKENS, *ROUTES, *UNKNOWN, *(step for steps in SCENARIOS.values() for step in steps)]


async def answers(port: SessionPort, num_turns: int, steps: Sequence[Step]) -> list[Any]:
    """Open a session, and return the answers to requests, without the names that each port gives."""
    session = await port.open(num_turns)
    names = {"KEY": session.get("control_key", "?"), "API": session["api_key"]}
    names |= {f"TURN{number}": name for number, name in enumerate(session["turns"])}
    found = []
    for step in steps:
        path, body, token = step.path, step.body, port.secret if step.token is None else step.token
        path = path.replace("ID", session["id"])
        for name, value in names.items():
            body, token = body.replace(name, value), token.replace(name, value)
        url = f"{port.url}/sessions{path}"
        async with port.http.request(step.method, url, data=body.encode(), headers=bearer(token)) as reply:
            text = (await reply.text()).replace(session["id"], "ID")
            found.append((step, reply.status, reply.headers.get("x-should-retry"), _same(json.loads(text))))
    return found


def _same(body: Any) -> Any:
    """Return a body without the parts in which the ports differ, which their pages describe."""
    body.pop("episode", None)  # a pool is told of no written episode
    body.pop("stats", None)  # each port counts other things
    if "sessions" in body:
        (listed,) = (each for each in body["sessions"] if each["id"] == "ID")
        listed["status"] = listed["status"] == "open"  # as `episode`
        body["sessions"] = [listed]
    if "agent" in body:
        del body["agent"]["name"]  # the agents of a pool have names
    return body


async def compare(folder: Path, scenarios: Sequence[tuple[int, Sequence[Step]]]) -> None:
    """Send each scenario to a session of its own at each port, and compare the answers."""
    found = []
    for open_port in PORTS.values():
        async with open_port(folder) as port:
            found.append([await answers(port, *each) for each in scenarios])
    for served, pooled in zip(*found, strict=True):
        for mine, other in zip(served, pooled, strict=True):
            assert mine == other


@pytest.mark.many_cases(10)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("num_turns", [0, 2])
def test_the_same_answers(tmp_path: Path, name: str, num_turns: int) -> None:
    """Status, error and body are the same, for sessions without a turn, too."""
    asyncio.run(compare(tmp_path, [(num_turns, SCENARIOS[name])]))


STEPS = st.lists(st.sampled_from(ANY), max_size=8)


@settings(max_examples=20)
@given(scenarios=st.lists(st.tuples(st.integers(0, 2), STEPS), min_size=1, max_size=4))
def test_the_same_answers_in_any_order(scenarios: list[tuple[int, list[Step]]]) -> None:
    """Whatever came before, both ports have the same state."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), scenarios))
