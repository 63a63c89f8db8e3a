"""The run's tools as a server of the Model Context Protocol: state, limits, errors, and hostile messages."""

import asyncio
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import mcp_agents
import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise import Status, ToolResult
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
METHODS = st.sampled_from(["initialize", "ping", "tools/list", "tools/call", "server/discover", ""]) | JSON
MESSAGES = st.fixed_dictionaries(
    {}, optional={"jsonrpc": st.just("2.0") | JSON, "id": JSON, "method": METHODS, "params": JSON, "result": JSON}
)


@pytest.fixture
def tally(monkeypatch):
    """The tool of the run."""
    monkeypatch.setattr(mcp_agents, "tally", mcp_agents.Tally())
    return mcp_agents.tally


@pytest.fixture
def run(tally):
    """Runs episodes at once, whose agent is a function of `mcp_agents`; returns their runs."""

    def start(agent, num_episodes=1, **options):
        resources = evolve(probe_resources(), tools={"tally": tally})
        config = ExternalConfig(function=f"mcp_agents:{agent}", **options)
        external = make_external(config, resources)
        probe = AgentProbe(make_agent=lambda: external, resources=resources, turns=("Done.",), response_length=1 << 14)

        async def run_all():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(probe.run(make_task(number))) for number in range(num_episodes)]
            return [task.result() for task in tasks]

        return asyncio.run(run_all())

    return start


def post(url, key, body, **headers):
    """Send bytes; return the status, the parsed body and the headers."""
    headers = {"Authorization": f"Bearer {key}", **headers}
    request = urllib.request.Request(f"{url}/mcp", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            text, status, sent = response.read(), response.status, response.headers
    except urllib.error.HTTPError as error:
        text, status, sent = error.read(), error.code, error.headers
        error.close()
    return status, json.loads(text) if text else None, sent


def test_tools_have_state_per_episode(run, tally):
    """Three episodes at once each add 2 and 3 in a separate session, which is released at the end."""
    runs = run("act", num_episodes=3)

    assert [Status.COMPLETED] * 3 == [each.result.status for each in runs]
    assert [5.0] * 3 == [each.episode.memory["reported_score"] for each in runs]
    assert ["probe-0", "probe-1", "probe-2"] == sorted(tally.opened) == sorted(tally.released)
    assert [[0.5, 0.5]] * 3 == [each.episode.memory["tool_rewards"] for each in runs]


def test_calls_are_counted_like_those_of_other_agents(run):
    """The metrics of an episode have its tool calls and the tool's own metrics."""
    (done,) = run("act")

    assert 2 == done.result.metrics.num_tool_calls
    assert 2 == done.result.metrics.extra["tool/additions"]


def test_errors_are_results_in_words(run):
    """A refusing tool, wrong arguments and an unknown tool are results with `isError`, and the next call runs."""
    (done,) = run("err")

    assert Status.COMPLETED is done.result.status
    assert 4 == done.result.metrics.num_tool_calls


def test_limits_of_calls_and_of_responses(run):
    """Calls over the limit are not run, and a long response is shortened."""
    (done,) = run("overdo", max_tool_calls=3, max_tool_response_length=100)

    assert Status.COMPLETED is done.result.status
    assert 3 == done.result.metrics.num_tool_calls
    assert 2 == done.result.metrics.extra["gateway/refused_tool_calls"]


def test_a_failing_service_ends_the_episode_with_its_owner(run):
    """A failure of the tool's service is not the agent's: the client reads an error, and the episode ends."""
    (done,) = run("hit_infrastructure")

    assert (Status.FAILED, "infra") == (done.result.status, done.result.fault.owner)
    assert "disk is full" in done.result.fault.message


@pytest.mark.parametrize("agent", ["hand_in", "hand_in_and_stay"])
def test_a_tool_ends_the_episode(agent, run):
    """The agent reads the result; whatever it does then, the episode is complete and has the turns before it."""
    (done,) = run(agent, exit_grace_s=0.2)

    assert Status.COMPLETED is done.result.status, done.result.fault
    assert done.result.metrics.num_turns == 1


def test_a_cut_call_is_cancelled(run, tally):
    """When the client breaks the connection, the tool is cancelled, and the session has its state for the next call."""
    (done,) = run("cut_a_call")

    assert Status.COMPLETED is done.result.status
    assert 1 == len(tally.opened)


def test_calls_in_flight_end_before_the_release(run, tally):
    """An agent that dies while a tool runs leaves no call behind: it is cancelled, then the session is released."""
    (done,) = run("leave_early")

    assert Status.FAILED is done.result.status
    assert tally.ended.is_set()
    assert ["probe-0"] == tally.released


CALL = json.dumps(
    {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1, "b": 2}}}
).encode()


def leave(gateway, body):
    """Send a message, wait until the whole response has come, and leave without reading it."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=600)
    connection.request("POST", "/s/s-1/mcp", body, {"Authorization": f"Bearer {gateway.key}"})
    while not connection.sock.recv(65536, socket.MSG_PEEK).endswith(b"}"):
        pass
    connection.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_call_whose_response_was_lost_does_not_run_again(gateway, request, busy):
    """The same message gets the response of the call that ran; the next one is a further call."""
    if busy:
        request.getfixturevalue("busy_server")
    texts = iter(range(10))
    gateway.backend.tool_script = lambda _call: ToolResult(text=str(next(texts)))
    leave(gateway, CALL)
    post(gateway.url, "wrong", CALL)  # the server has noticed the end of the connection before
    if busy:
        request.getfixturevalue("monkeypatch").undo()
    found = [post(gateway.url, gateway.key, CALL)[1]["result"]["content"][0]["text"] for _ in range(2)]

    assert ["0", "1"] == found
    assert 2 == len(gateway.backend.calls)


def test_a_call_with_the_same_key_runs_once(gateway):
    """A message with a key runs its tool once, however often it comes; with another key, it runs the tool again."""
    gateway.backend.tool_script = lambda _call: ToolResult(text=str(len(gateway.backend.calls)))
    headers = [{"Idempotency-Key": key} for key in "aab"]
    found = [post(gateway.url, gateway.key, CALL, **each)[1]["result"]["content"][0]["text"] for each in headers]

    assert ["1", "1", "2"] == found


def test_a_call_with_the_same_key_waits_for_the_first(gateway):
    """Two messages at once with one key run the tool once."""
    started, goes_on = threading.Event(), threading.Event()

    def add(_call):
        started.set()
        assert goes_on.wait(60)
        return ToolResult(text=str(len(gateway.backend.calls)))

    gateway.backend.tool_script = add
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(post, gateway.url, gateway.key, CALL, **{"Idempotency-Key": "a"}) for _ in range(2)]
        assert started.wait(60)
        goes_on.set()
        assert ["1", "1"] == [call.result()[1]["result"]["content"][0]["text"] for call in calls]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
def test_other_methods(gateway, method):
    """There is no stream to get and nothing to delete: 405, which clients take for a no."""
    request = urllib.request.Request(
        f"{gateway.url}/mcp", headers={"Authorization": f"Bearer {gateway.key}"}, method=method
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=600)

    assert (405, "POST") == (caught.value.code, caught.value.headers["Allow"])
    caught.value.close()


def test_key_opens_one_session(gateway):
    """A wrong key and an unknown session are 401; the key alone names the session, too."""
    ping = b'{"jsonrpc": "2.0", "id": "a", "method": "ping"}'

    assert (200, {"jsonrpc": "2.0", "id": "a", "result": {}}) == post(gateway.url, gateway.key, ping)[:2]
    assert 200 == post(gateway.server.url(), gateway.key, ping)[0]
    assert 401 == post(gateway.url, "wrong", ping)[0]
    assert 401 == post(gateway.server.url("s-2"), gateway.key, ping)[0]


def test_a_closed_session_says_so(gateway, refused):
    """After the end, a call is an error with the reason."""
    gateway.backend.tool_script = lambda _call: refused("session_closed", "the session is over")
    call = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add"}}'
    status, reply, _ = post(gateway.url, gateway.key, call)

    assert (200, "session_closed: the session is over") == (status, reply["error"]["message"])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, -32700),
        (b"{", 400, -32700),
        (b"\xff", 400, -32700),
        (b'{"a": 1, "a": 2}', 400, -32700),
        (b'"ping"', 400, -32700),
        (b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', 400, -32600),
        (b'{"id": 1, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": 5}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/drop"}', 200, -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "initialize"}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"cursor": "x"}}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}', 200, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "a", "arguments": []}}', 200, -32602),
    ],
)
def test_bad_messages(gateway, body, status, code):
    """Each bad message has the status and the code of its specification, and calls no tool."""
    got, reply, _ = post(gateway.url, gateway.key, body)

    assert (status, code) == (got, reply["error"]["code"])
    assert [] == gateway.backend.calls


@pytest.mark.parametrize("message", ['"method": "notifications/cancelled"', '"id": 1, "result": {}'])
def test_notifications_and_responses_have_no_answer(gateway, message):
    """A notification, and a response to a request that was never sent, are 202."""
    assert (202, None) == post(gateway.url, gateway.key, f'{{"jsonrpc": "2.0", {message}}}'.encode())[:2]


@pytest.mark.parametrize(
    ("asked", "spoken"), [("2025-03-26", "2025-03-26"), ("2025-11-25", "2025-11-25"), ("1999-01-01", "2025-11-25")]
)
def test_version_of_the_protocol(gateway, asked, spoken):
    """The server speaks the client's version, or offers its newest; a header with another one is refused."""
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": asked}}
    _, reply, _ = post(gateway.url, gateway.key, json.dumps(hello).encode())
    assert spoken == reply["result"]["protocolVersion"]
    ping = b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}'
    known = asked == spoken

    status, reply, _ = post(gateway.url, gateway.key, ping, **{"MCP-Protocol-Version": asked})

    assert (200 if known else 400, known) == (status, "result" in reply)


@given(message=MESSAGES)
@example({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "a", "arguments": {"\ud800": 1}}})
def test_any_message_has_an_answer(lasting_gateway, message):
    """No JSON makes the server fail: an answer has the id of its request, with a result or with an error."""
    status, reply, _ = post(lasting_gateway.url, lasting_gateway.key, json.dumps(message).encode())

    assert status in {200, 202, 400}
    if reply is not None:
        assert ("result" in reply) != ("error" in reply)
        assert reply["id"] in (None, message.get("id"))
