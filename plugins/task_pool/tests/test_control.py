"""The control port: leases and scores over HTTP."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import ClientSession, web
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise_gateway.calls import CallOfTool, CallRefusedError, DeliveredTurn, ModelCall, ModelReply, Usage
from turnwise_gateway.control.control_server import ControlServer, RequestError
from turnwise_gateway.control.scores import Verdict
from turnwise_gateway.host import ModelClient
from turnwise_gateway.session.door import SessionDoor
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.driver.control import build_pool_app
from turnwise_task_pool.driver.offers import Offers, OpenLease, WorkerGoneError
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import Lease, PoolTask
from turnwise_task_pool.pool.task_pool import TaskPool
from turnwise_task_pool.workers.attempts import LeasedSession
from turnwise_task_pool.workers.lease_renewal import LeaseRenewal
from turnwise_task_pool.workers.worker import PoolWorker

SECRET = "a secret of the control port"
LEASE_S = 10.0
LARGE = b"9" * 400
TURN = ModelReply(
    id="t0",
    content="Hm.",
    reasoning="think",
    tool_calls=(CallOfTool(id="abc123456", name="add", arguments='{"a": 1}'),),
    usage=Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=3),
    token_ids=np.array([4, 5], np.int32),
    logprobs=np.array([-0.5, -np.inf], np.float32),
    provenance={"record": 0},
)


@define(eq=False)
class Reply:
    """A reply that its confirmation puts into a transcript."""

    call: ModelCall
    reply: ModelReply
    transcript: list[DeliveredTurn]

    def confirm(self) -> None:
        self.transcript.append(DeliveredTurn(self.call, self.reply))

    def release(self) -> None:
        """Forget it."""

    def lose(self) -> None:
        """Leave it."""


class ScriptedSession:
    """Answers each call with the next reply of a list."""

    def __init__(self) -> None:
        self.door = SessionDoor(fail=lambda error: None, changed=asyncio.Event())
        self.replies: list[ModelReply] = []
        self.transcript: list[DeliveredTurn] = []
        self.episode = SimpleNamespace(task=SimpleNamespace(uid="t"), global_step=3, rollout_n=0)
        self.book = SimpleNamespace(records=[])
        self.others = SimpleNamespace(noted=[])

    async def answer(self, call: ModelCall) -> Reply:
        async with self.door.holding():
            return Reply(call, self.replies.pop(0), self.transcript)

    def deliver(self, turn_id: str) -> bool:
        return any(turn.reply.id == turn_id for turn in self.transcript)


@define(eq=False)
class Link:
    """A worker with scripted sessions; it answers at once."""

    worker: PoolWorker = field(factory=lambda: PoolWorker(None, None, PoolConfig(control_file="unused")))
    is_gone: bool = False

    async def ask(self, kind: str, **body: object) -> object:
        if self.is_gone:
            raise WorkerGoneError
        found = self.worker._answer(kind, body)
        if isinstance(found, dict) and "error" in found:
            raise RequestError(*found["error"])
        return found

    def tell(self, kind: str, **body: object) -> None:
        self.worker._answer(kind, body)


@define(eq=False)
class Finder(Offers):
    """The offers of one worker."""

    link: Link = field(factory=Link, init=False)

    @property
    def sessions(self) -> dict[str, LeasedSession]:
        return self.link.worker._sessions._sessions

    async def open(self, lease: Lease) -> dict[str, object]:
        async def renew() -> bool:
            return await self.pool.heartbeat(lease.id, lease.fence) is Verdict.ACCEPTED

        leased = LeasedSession(lease.id, ScriptedSession(), worker=lease.worker, lease=lease)
        leased.session.door.hold = LeaseRenewal(renew, LEASE_S, leased.end).hold
        leased.client = ModelClient(
            openai_base_url="o", anthropic_base_url="a", api_key=f"key-{lease.id}", model="policy", mcp_url="m"
        )
        self.link.worker._sessions.add(leased)
        self._leases[lease.id] = OpenLease(lease.fence, self.link, leased.control_key)
        return leased.describe_access()


@define(eq=False)
class Site:
    """A control port and a client that knows its secret."""

    client: ClientSession
    pool: TaskPool
    finder: Finder
    now: list[float]
    url: str

    async def post(self, path: str, status: int = 200, **body: object) -> dict[str, object]:
        """Send a request, check its status and return the response."""
        async with self.client.post(path, json=body) as response:
            assert status == response.status, await response.text()
            return await response.json() if status != 204 else {}

    async def get(self, path: str) -> dict[str, object]:
        async with self.client.get(path) as response:
            assert response.status == 200
            return await response.json()

    async def put_and_lease(self, uid: str = "t") -> dict[str, object]:
        await self.pool.put(PoolTask(uid=uid, global_step=3, content={"messages": [{"role": "user", "content": "?"}]}))
        return await self.post("/tasks/lease", worker="w", wait_s=10)

    async def results(self) -> list[tuple[object, ...]]:
        found = await self.pool.results(wait=False)
        return [(each.uid, each.state, each.score, dict(each.metrics)) for each in found]


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    now = [0.0]
    store = SqliteStore(folder / "pool.sqlite", max_attempts=2)
    async with TaskPool(store, 8, lease_s=LEASE_S, clock=lambda: now[0]) as pool:
        finder = Finder(pool)
        async with (
            ControlServer(build_pool_app(pool, finder, SECRET)) as server,
            ClientSession(server.url, headers={"Authorization": f"Bearer {SECRET}"}) as client,
        ):
            yield Site(client, pool, finder, now, server.url)


@pytest.fixture
def at_site(tmp_path: Path) -> Callable[[Callable[[Site], Awaitable[None]]], None]:
    """A function that runs a test's coroutine with a control port."""

    def run(check: Callable[[Site], Awaitable[None]]) -> None:
        async def main() -> None:
            async with open_site(tmp_path) as site:
                await check(site)

        asyncio.run(main())

    return run


def test_a_lease_has_all_that_an_agent_needs(at_site) -> None:
    """The task, the names of the lease and the access to the model; without a task, 204."""

    async def check(site: Site) -> None:
        await site.post("/tasks/lease", 204, worker="w")
        found = await site.put_and_lease()
        assert {
            "lease": {"id": "1-0-1", "fence": 1, "attempt": 1, "expires_in_s": LEASE_S},
            "task": {"messages": [{"role": "user", "content": "?"}], "uid": "t", "global_step": 3, "rollout_n": 0},
            "session": {
                "id": "1-0-1",
                "control_key": site.finder.sessions["1-0-1"].control_key,
                "openai_base_url": "o",
                "anthropic_base_url": "a",
                "mcp_url": "m",
                "api_key": "key-1-0-1",
                "model": "policy",
            },
        } == found
        assert (await site.get("/tasks"))["stats"]["leased"] == 1

    at_site(check)


def test_a_score_ends_a_lease_once(at_site) -> None:
    """The same news again is fine, another score is refused."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        assert {"verdict": "accepted", "expires_in_s": LEASE_S} == await site.post("/leases/1-0-1/heartbeat", fence=1)
        await site.post("/leases/1-0-1/complete", fence=1, score=1, metrics={"tests": 3})
        assert {"verdict": "repeated"} == await site.post(
            "/leases/1-0-1/complete", fence=1, score=1.0, metrics={"tests": 3}
        )
        error = await site.post("/leases/1-0-1/complete", 409, fence=1, score=0, metrics={"tests": 3})
        assert error["error"]["code"] == "conflict"
        await site.post("/leases/1-0-1/heartbeat", 409, fence=1)
        await site.post("/leases/1-0-1/fail", 409, fence=1, reason="oh")
        assert [("t", "done", 1.0, {"tests": 3})] == await site.results()

    at_site(check)


def test_a_score_without_the_fence_changes_nothing(at_site) -> None:
    """Neither does one of an unknown lease."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        await site.post("/leases/1-0-1/complete", 409, fence=2, score=1)
        await site.post("/leases/1-0-9/complete", 404, fence=9, score=1)
        await site.post("/leases/x/complete", 404, fence=1, score=1)
        assert [] == await site.results()
        await site.post("/leases/1-0-1/complete", fence=1, score=0.5)

    at_site(check)


def test_failed_attempts_are_tried_again_until_the_last(at_site) -> None:
    """Then the rollout is dead, with the reason and its owner; the session of a failed attempt is over."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        await site.post("/leases/1-0-1/fail", fence=1, reason="no idea")
        with pytest.raises(CallRefusedError, match="has ended"):
            await site.finder.sessions["1-0-1"].session.answer(ModelCall(dialect="chat", messages=()))
        lease = (await site.post("/tasks/lease", worker="w", wait_s=10))["lease"]
        assert ("1-0-2", 2) == (lease["id"], lease["attempt"])
        await site.post("/leases/1-0-1/complete", 409, fence=1, score=1)
        await site.post("/leases/1-0-2/fail", fence=2, reason="disk full", owner="infra")
        await site.post("/leases/1-0-2/fail", fence=2, reason="disk full", owner="infra")
        (result,) = await site.pool.results()
        assert ("dead", "infra", "disk full") == (result.state, result.owner, result.reason)

    at_site(check)


def test_the_score_of_a_session_ends_it(at_site) -> None:
    """Once: the same id again is fine, another one is refused, also for an unscored end."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        await site.post("/sessions/1-0-1/score", id="a", score=1, metrics={"s": 2})
        await site.post("/sessions/1-0-1/score", id="a", score=1, metrics={"s": 2})
        await site.post("/sessions/1-0-1/score", 409, id="a", score=0.5)
        error = await site.post("/sessions/1-0-1/score", 409, id="b", score=1)
        assert error["error"]["code"] == "late"
        await site.post("/leases/1-0-1/complete", 200, fence=1)  # the agent says that it is done
        await site.post("/sessions/9-0-9/score", 404, id="a", score=1)
        assert [("t", "done", 1.0, {"s": 2.0})] == await site.results()
        await site.put_and_lease("u")
        await site.post("/leases/2-0-2/complete", fence=2)
        await site.post("/sessions/2-0-2/score", 409, id="a", score=1)
        assert ("u", "done", None, {}) == (await site.results())[-1]

    at_site(check)


def test_turns_are_scored_one_by_one(at_site) -> None:
    """Only turns that the agent has got; the end of the lease brings them together."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        session = site.finder.sessions["1-0-1"]
        session.session.replies = [evolve(TURN, id=f"t{number}") for number in range(3)]
        for _ in range(3):
            (await session.session.answer(ModelCall(dialect="chat", messages=()))).confirm()
        await site.post("/sessions/1-0-1/score", id="a", score=1, turn=2)
        await site.post("/sessions/1-0-1/score", id="b", score=0.5, turn=0)
        await site.post("/sessions/1-0-1/score", id="b", score=0.5, turn=0)
        await site.post("/sessions/1-0-1/score", id="b", score=0.5, turn="chatcmpl-t0")
        await site.post("/sessions/1-0-1/score", 409, id="c", score=1, turn=0)
        await site.post("/sessions/1-0-1/score", 409, id="c", score=1, turn="t0")
        await site.post("/sessions/1-0-1/score", 404, id="c", score=1, turn="t3")
        await site.post("/sessions/1-0-1/score", 409, id="c", score=1)
        await site.post("/sessions/1-0-1/score", 404, id="c", score=1, turn=3)
        await site.post("/leases/1-0-1/complete", 409, fence=1, score=9)
        await site.post("/leases/1-0-1/complete", fence=1)
        await site.post("/sessions/1-0-1/score", 409, id="d", score=1, turn=1)
        assert [("t", "done", {"turns": {"t2": 1.0, "t0": 0.5}}, {})] == await site.results()

    at_site(check)


def test_late_news_of_an_expired_lease_change_nothing(at_site) -> None:
    """Between the expiry and the next lease, and afterwards."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        site.now[0] += LEASE_S
        await site.post("/sessions/1-0-1/score", 409, id="a", score=1)
        lease = (await site.post("/tasks/lease", worker="w", wait_s=10))["lease"]
        assert lease["fence"] == 2
        await site.post("/leases/1-0-1/complete", 409, fence=1, score=1)
        await site.post("/leases/1-0-2/complete", fence=2, score=0)
        assert [("t", "done", 0.0, {})] == await site.results()
        assert (await site.pool.stats())["complete/late"] == 2

    at_site(check)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tasks/lease", b"{}", "'worker'"),
        ("/tasks/lease", b'{"worker": "w", "wait_s": "1"}', "'wait_s'"),
        ("/tasks/lease", b'{"worker": "w", "wait": 1}', "unknown field 'wait'"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "score": NaN}', "malformed"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "score": 1e999}', "malformed"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "fence": 1}', "given twice"),
        ("/leases/1-0-1/complete", b'{"fence": true}', "'fence'"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "metrics": {"a": "b"}}', "'metrics.a'"),
        ("/leases/1-0-1/fail", b'{"fence": 1, "owner": "me"}', "'owner'"),
        ("/sessions/1-0-1/score", b'{"id": "a"}', "'score'"),
        ("/tasks/lease", b'{"worker": "w", "wait_s": %s}' % LARGE, "'wait_s'"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "score": %s}' % LARGE, "'score'"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "score": 1e308}', "'score'"),
        ("/leases/1-0-1/complete", b'{"fence": 1, "metrics": {"a": %s}}' % LARGE, "'metrics.a'"),
        ("/sessions/1-0-1/score", b'{"id": "a", "score": %s}' % LARGE, "'score'"),
        ("/sessions/1-0-1/score", b'{"id": "a", "score": -1e39}', "'score'"),
        ("/sessions/1-0-1/score", b'{"id": "a", "score": true}', "'score'"),
        ("/sessions/1-0-1/score", b'{"id": "a", "score": 1, "turn": 1.0}', "'turn'"),
        ("/sessions/1-0-1/score", b'{"id": "a", "score": 1, "turn": -1}', "'turn'"),
    ],
)
def test_bad_requests_change_nothing(at_site, path: str, body: bytes, message: str) -> None:
    """They end with 400 and a text that names the field."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        async with site.client.post(path, data=body) as response:
            assert response.status == 400
            assert message in (await response.json())["error"]["message"]
        assert [] == await site.results()
        assert len(await site.pool.leases()) == 1

    at_site(check)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["w", "a", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = ("worker", "wait_s", "fence", "score", "metrics", "reason", "owner", "id", "record", "turn")
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, VALUES)) | VALUES
ROUTES = (
    "/tasks/lease",
    "/leases/1-0-1/heartbeat",
    "/leases/1-0-1/complete",
    "/leases/1-0-1/fail",
    "/sessions/1-0-1/score",
)


@settings(max_examples=60)
@given(requests=st.lists(st.tuples(st.sampled_from(ROUTES), st.none() | st.sampled_from(FIELDS), BODIES), max_size=12))
def test_no_body_makes_the_port_fail(requests) -> None:
    """Any JSON at any route is answered, and never with a 5xx."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        for path, left_alone, body in requests:
            if isinstance(body, dict) and left_alone:  # so that some bodies are nearly right
                body = {"worker": "w", "fence": 1, "score": 1, "id": "a", "reason": "r"} | body
                body = {name: body[name] for name in KNOWN[path] if name in body}
            if isinstance(body, dict):
                body.pop("wait_s", None)  # no example waits
            async with site.client.post(path, data=json.dumps(body)) as response:
                assert response.status < 500, (path, body)

    async def main(folder: str) -> None:
        async with open_site(Path(folder)) as site:
            await check(site)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))


def test_a_malformed_head_stays_out_of_the_log(at_site, caplog: pytest.LogCaptureFixture) -> None:
    """A head that cannot be parsed is refused, and the log has no secret in it."""

    async def check(site: Site) -> None:
        host, port = site.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /tasks/lease HTTP/1.1\nAuthorization: Bearer {SECRET}\n\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()

    at_site(check)

    assert "BadStatusLine" in caplog.text
    assert SECRET not in caplog.text


KNOWN = {
    "/tasks/lease": ("worker",),
    "/leases/1-0-1/heartbeat": ("fence",),
    "/leases/1-0-1/complete": ("fence", "score", "metrics"),
    "/leases/1-0-1/fail": ("fence", "reason", "owner"),
    "/sessions/1-0-1/score": ("id", "score", "record", "turn", "metrics"),
}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer another secret"},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": "Bearer key-1-0-1"},
    ],
)
def test_only_the_secret_opens_the_port(at_site, headers: dict[str, str]) -> None:
    """Neither no token nor the key of a session is enough, for any route."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        for method, path in [
            ("POST", "/tasks/lease"),
            ("POST", "/leases/1-0-1/complete"),
            ("POST", "/sessions/1-0-1/score"),
            ("GET", "/sessions/1-0-1"),
            ("GET", "/tasks"),
            ("GET", "/elsewhere"),
        ]:
            async with site.client.request(method, path, headers=headers, json={}) as response:
                assert response.status == 401
        assert (await site.pool.stats())["leased"] == 1

    at_site(check)


def test_other_hosts_and_routes_are_refused(at_site) -> None:
    """A web page cannot reach the port under another name; unknown routes get JSON."""

    async def check(site: Site) -> None:
        async with site.client.get("/tasks", headers={"Host": "evil.example"}) as response:
            assert response.status == 400
        async with site.client.get("/nothing") as response:
            assert (404, "not_found") == (response.status, (await response.json())["error"]["code"])
        async with site.client.post("/tasks/lease", data=BytesIO(b"x" * 2**21)) as response:
            assert response.status == 413

    at_site(check)


def test_short_secrets_are_refused(tmp_path: Path) -> None:
    """A short secret can be guessed."""
    pool = TaskPool(SqliteStore(tmp_path / "pool.sqlite"), 1)

    with pytest.raises(ConfigError, match="16 characters"):
        build_pool_app(pool, Finder(pool), "short")


def test_a_request_whose_worker_has_just_died_may_come_again(at_site) -> None:
    """It gets 429 with the time to wait, for any route that asks the worker."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        site.finder.link.is_gone = True
        for method, path, body in [
            ("GET", "/sessions/1-0-1", None),
            ("DELETE", "/sessions/1-0-1", None),
            ("POST", "/sessions/1-0-1/score", {"id": "a", "score": 1}),
            ("POST", "/leases/1-0-1/complete", {"fence": 1}),
        ]:
            async with site.client.request(method, path, json=body) as response:
                assert (429, "1") == (response.status, response.headers["retry-after"])
                assert "x-should-retry" not in response.headers
                assert "ask again" in (await response.json())["error"]["message"]

    at_site(check)


def test_the_control_key_opens_no_lease(at_site) -> None:
    """It opens the routes of its session, and neither those of its lease nor those of others."""

    async def check(site: Site) -> None:
        leased, other = await site.put_and_lease(), await site.put_and_lease("u")
        headers = {"Authorization": f"Bearer {leased['session']['control_key']}"}
        for method, path, status in [
            ("GET", f"/sessions/{leased['lease']['id']}", 200),
            ("GET", f"/sessions/{other['lease']['id']}", 401),
            ("GET", "/sessions", 401),
            ("GET", "/tasks", 401),
            ("POST", f"/leases/{leased['lease']['id']}/complete", 401),
        ]:
            async with site.client.request(method, path, headers=headers, json={}) as response:
                assert status == response.status, path

    at_site(check)


def test_a_failure_ends_its_session_although_the_client_leaves(at_site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has the failure, so nobody else would end the session."""
    asked, goes_on, fail = asyncio.Event(), asyncio.Event(), TaskPool.fail

    async def fail_late(pool: TaskPool, *names: object, **news: object) -> Verdict:
        asked.set()
        await goes_on.wait()
        return await fail(pool, *names, **news)

    monkeypatch.setattr(TaskPool, "fail", fail_late)

    async def check(site: Site) -> None:
        await site.put_and_lease()
        async with asyncio.TaskGroup() as group:
            request = group.create_task(site.post("/leases/1-0-1/fail", fence=1, reason="no idea"))
            await asked.wait()
            request.cancel()
        await asyncio.sleep(0.1)  # the port sees that its client has left
        goes_on.set()
        await asyncio.wait_for(site.finder.sessions["1-0-1"].ended.wait(), 20)

    at_site(check)


def test_an_agent_that_hangs_up_takes_no_task(at_site) -> None:
    """Its request ends, and the task goes to the next agent as its first attempt."""

    async def check(site: Site) -> None:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.1):
                await site.post("/tasks/lease", worker="gone", wait_s=50)
        while site.pool._waiters:  # noqa: ASYNC110 - a pool tells nobody when an agent leaves
            await asyncio.sleep(0.01)
        assert (await site.put_and_lease())["lease"]["attempt"] == 1

    at_site(check)


def test_a_session_as_json_and_atif(at_site) -> None:
    """The turns with their tokens, and the steps with calls and observations; other records are sub-agents."""

    async def check(site: Site) -> None:
        await site.put_and_lease()
        session = site.finder.sessions["1-0-1"]
        answer = {"role": "assistant", "content": "Hm.", "tool_calls": []}
        first = ({"role": "system", "content": "s"}, {"role": "user", "content": "?"})
        result = {"role": "tool", "tool_call_id": "abc123456", "content": "2"}
        last = evolve(TURN, tool_calls=(), reasoning="", content="Two.")
        other = evolve(last, provenance={"record": 1})
        session.session.replies = [TURN, other, last]
        for messages in (first, first[1:], (*first, answer, result)):
            (await session.session.answer(ModelCall(dialect="chat", messages=messages))).confirm()

        described = await site.get("/sessions/1-0-1")
        assert ["0", "1"] == list(described["records"])
        assert [0, 2] == [each["turn"] for each in described["records"]["0"]]
        assert [4, 5] == described["records"]["0"][0]["completion_token_ids"]

        exported = await site.get("/sessions/1-0-1?format=atif")
        metrics = {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 3}
        metrics |= {"completion_token_ids": [4, 5], "logprobs": [-0.5, -9999.0]}
        assert "ATIF-v1.7" == exported["schema_version"]
        assert {"name": "w", "version": "", "model_name": "policy"} == exported["agent"]
        assert [
            {"step_id": 1, "source": "system", "message": "s"},
            {"step_id": 2, "source": "user", "message": "?"},
            {
                "step_id": 3,
                "source": "agent",
                "message": "Hm.",
                "reasoning_content": "think",
                "tool_calls": [{"tool_call_id": "abc123456", "function_name": "add", "arguments": {"a": 1}}],
                "metrics": metrics,
                "observation": {"results": [{"source_call_id": "abc123456", "content": "2"}]},
            },
            {"step_id": 4, "source": "agent", "message": "Two.", "metrics": metrics},
        ] == exported["steps"]
        assert {
            "total_prompt_tokens": 14,
            "total_completion_tokens": 4,
            "total_cached_tokens": 6,
            "total_steps": 4,
        } == exported["final_metrics"]
        (child,) = exported["subagent_trajectories"]
        assert ["user", "agent"] == [each["source"] for each in child["steps"]]
        async with site.client.get("/sessions/1-0-1?format=xml") as response:
            assert response.status == 400

    at_site(check)


def test_the_agents_port_has_no_control_routes() -> None:
    """No route of the control port is one of the agents' port."""
    from turnwise_gateway.server.routes import find_route

    app = build_pool_app(None, None, SECRET)
    for route in app.router.routes():
        path = route.resource.canonical.replace("{id}", "1-0-1")
        with pytest.raises(CallRefusedError):
            find_route(route.method, path, "http://127.0.0.1:1")
    assert isinstance(app, web.Application)
