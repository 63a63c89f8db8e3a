"""Connection of a run to a Ray cluster, and the one-line errors of a failure; no Ray is started."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

from turnwise.errors import ConfigError, EngineError
from turnwise.runtime.ray import cluster
from turnwise.runtime.ray.cluster import Cluster, call_ray
from turnwise.runtime.remote.supervision import make_slots

ray = pytest.importorskip("ray")


@pytest.fixture
def started(monkeypatch):
    """Record the arguments of `ray.init`; nothing is started."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options["address"]))
    monkeypatch.setattr(ray, "shutdown", lambda **_options: calls.append("shutdown"))
    return calls


@pytest.fixture
def port():
    """A port of this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def visit(ours):
    """Connect and disconnect."""

    async def both():
        await ours.connect()
        await ours.close()

    asyncio.run(both())


def refusal(address, kind=ConfigError):
    with pytest.raises(kind) as raised:
        asyncio.run(Cluster(address).connect())
    return str(raised.value)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_unreachable_address_is_an_error_before_ray_tries(started, port, prefix):
    """The error comes at once; Ray would retry for more than ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]

    line = f"runtime.ray.address: cannot connect to 127.0.0.1:{closed}: Connection refused"
    assert line == refusal(f"{prefix}127.0.0.1:{closed}")
    assert refusal(f"{prefix}no-such-host.invalid:6379").startswith(
        "runtime.ray.address: cannot connect to no-such-host.invalid:6379: "
    )
    assert [] == started


def test_a_silent_host_is_waited_for_a_short_time(started, monkeypatch):
    """The error names the time."""

    def silent(place, timeout):
        assert (("10.0.0.1", 6379), cluster.PROBE_TIMEOUT_S) == (place, timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert "runtime.ray.address: cannot connect to 10.0.0.1:6379: no connection within 5 s" == refusal("10.0.0.1:6379")
    assert [] == started


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_a_reachable_address_is_passed_to_ray(started, port, prefix):
    """The run connects to the cluster at that address, and disconnects at its end."""
    visit(Cluster(f"{prefix}127.0.0.1:{port}"))
    assert [f"{prefix}127.0.0.1:{port}", "shutdown"] == started


@pytest.mark.parametrize("address", ["auto", "local", None])
def test_an_address_without_a_host_is_passed_to_ray(started, address):
    """Without any address, Ray starts a cluster."""
    visit(Cluster(address))
    assert [address or "local", "shutdown"] == started


@pytest.mark.parametrize("address", [None, "auto", "10.0.0.1:6379", "ray://head:10001"])
@pytest.mark.parametrize("mode", ["disabled", "k8s"])
def test_an_exposed_cluster_without_tokens_is_refused(started, monkeypatch, address, mode):
    """Nothing is started or joined, unless the network is trusted."""
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(cluster, "_check_reachable", lambda _address: None)

    assert "which requires no token" in refusal(address)
    assert [] == started
    visit(Cluster(address, trusted_network=True))
    assert [address or "local", "shutdown"] == started


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_cluster_that_asked_for_no_token_is_left(started, monkeypatch, address):
    """An older Ray starts clusters without a token, and a cluster may let everyone in."""
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(cluster, "_check_reachable", lambda _address: None)

    assert "which requires no token" in refusal(address)
    assert [address or "local", "shutdown"] == started


def test_a_cluster_on_loopback_needs_no_token(started, monkeypatch, port):
    """Its owner decides."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    visit(Cluster(f"127.0.0.1:{port}"))
    assert [f"127.0.0.1:{port}", "shutdown"] == started


def test_a_malformed_address_is_an_error(started):
    """The error shows the expected form, also if no config was checked before."""
    assert "expected host:port" in refusal("nonsense")
    assert [] == started


def test_an_error_of_ray_is_one_line_with_its_cause(started, port, monkeypatch):
    """A cluster that requires a token puts the cause into the last line of a traceback inside its text."""

    def fail(**_options):
        cause = RuntimeError("Failed. Last error: Traceback (most recent call last):\n  File\nAuth: token is missing\n")
        raise ConnectionError("Failed to connect to Ray\nmore") from cause

    monkeypatch.setattr(ray, "init", fail)
    line = f"cannot join the cluster at 127.0.0.1:{port}: Failed to connect to Ray: Auth: token is missing"
    assert f"runtime.ray.address: {line}" == refusal(f"127.0.0.1:{port}")
    assert ["shutdown"] == started
    assert "Ray does not start on this machine: Failed to connect to Ray: Auth: token is missing" == refusal(
        None, EngineError
    )


def test_an_error_of_ray_without_text_is_named_by_its_class(started, monkeypatch):
    """The line ends with the name of the class."""

    def fail(**_options):
        raise OSError

    monkeypatch.setattr(ray, "init", fail)
    assert "runtime.ray.address: cannot join the cluster at auto: OSError" == refusal("auto")


@pytest.fixture
def gcs():
    """An event: Ray's GCS has stopped until it is set."""
    answers = threading.Event()
    yield answers
    answers.set()


@pytest.mark.parametrize("ends_by", ["timeout", "cancellation"])
def test_a_stopped_gcs_blocks_neither_the_loop_nor_the_end(gcs, ends_by):
    """The caller gets its timeout or cancellation, and `asyncio.run` does not wait for the thread."""

    async def ask():
        async with asyncio.timeout(0.05 if ends_by == "cancellation" else None):
            await call_ray(gcs.wait, 0.05 if ends_by == "timeout" else 60.0)

    with pytest.raises(TimeoutError, match="Ray did not answer within" if ends_by == "timeout" else "^$"):
        asyncio.run(ask())
    assert not gcs.is_set()


def test_an_actor_starts_beside_the_event_loop(gcs, monkeypatch):
    """Ray waits for its GCS when it starts an actor; meanwhile, the loop handles Ctrl-C."""
    started = []

    def start(*arguments):
        started.append((gcs.wait(30), *arguments))
        return "actor"

    monkeypatch.setattr(ray, "remote", lambda _kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start)))
    (slot,) = make_slots("worker", 1)

    async def start_and_answer():
        starting = asyncio.ensure_future(Cluster().start_actor(object, slot, {}, 1, 2, timeout_s=60.0))
        await asyncio.sleep(0)
        gcs.set()  # by the loop, which would never come here if the start blocked it
        return await starting

    assert "actor" == asyncio.run(start_and_answer())
    assert [(True, 1, 2)] == started


@pytest.mark.parametrize("answers", [True, False])
def test_ray_ends_when_no_thread_calls_it(started, gcs, monkeypatch, answers):
    """The end waits for a call whose caller was cancelled; the C++ code would abort the process. It has a deadline."""
    monkeypatch.setattr(cluster, "END_S", 30.0 if answers else 0.01)
    events = []
    monkeypatch.setattr(cluster, "end_ray", lambda *_own, **_options: events.append("ended"))

    def call():
        gcs.wait(30)
        events.append("answered")

    async def main():
        ours = Cluster()
        await ours.connect()
        with pytest.raises(TimeoutError):
            await call_ray(call, 0.01)
        closing = asyncio.ensure_future(ours.close())
        if answers:
            await asyncio.sleep(0.05)
            gcs.set()
        await closing

    asyncio.run(main())
    assert (["answered", "ended"] if answers else ["ended"]) == events
