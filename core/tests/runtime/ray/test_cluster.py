"""How a run reaches its Ray cluster, and the one line that says why it could not; no Ray is started."""

import asyncio
import socket

import pytest

from turnwise.errors import ConfigError, EngineError
from turnwise.runtime import cluster
from turnwise.runtime.cluster import Cluster

ray = pytest.importorskip("ray")


@pytest.fixture
def started(monkeypatch):
    """What `ray.init` was called with; nothing is started."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options["address"]))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


@pytest.fixture
def port():
    """A port of this machine that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refusal(address, kind=ConfigError):
    with pytest.raises(kind) as raised:
        asyncio.run(Cluster(address).connect())
    return str(raised.value)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_answers_is_refused_before_ray_tries(started, port, prefix):
    """Ray would try for more than ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]

    line = f"runtime.ray.address: nothing answers at 127.0.0.1:{closed}: Connection refused"
    assert line == refusal(f"{prefix}127.0.0.1:{closed}")
    assert refusal(f"{prefix}no-such-host.invalid:6379").startswith(
        "runtime.ray.address: nothing answers at no-such-host.invalid:6379: "
    )
    assert [] == started


def test_a_silent_host_is_waited_for_a_short_time(started, monkeypatch):
    """The error says for how long."""

    def silent(place, timeout):
        assert (("10.0.0.1", 6379), cluster.PROBE_TIMEOUT_S) == (place, timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert "runtime.ray.address: nothing answers at 10.0.0.1:6379: no connection within 5 s" == refusal("10.0.0.1:6379")
    assert [] == started


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_that_answers_is_left_to_ray(started, port, prefix):
    """The whole run goes there, and ends without the cluster."""

    async def visit(address):
        ours = Cluster(address)
        await ours.connect()
        await ours.close()

    asyncio.run(visit(f"{prefix}127.0.0.1:{port}"))
    assert [f"{prefix}127.0.0.1:{port}", "shutdown"] == started


@pytest.mark.parametrize("address", ["auto", "local", None])
def test_what_names_no_host_is_left_to_ray(started, address):
    """Without an address Ray starts a cluster."""

    async def visit():
        ours = Cluster(address)
        await ours.connect()
        await ours.close()

    asyncio.run(visit())
    assert [address or "local", "shutdown"] == started


def test_a_text_that_is_no_address_is_refused(started):
    """Also where no config was checked before."""
    assert "expected host:port" in refusal("nonsense")
    assert [] == started


def test_an_error_of_ray_is_one_line_with_its_cause(started, port, monkeypatch):
    """As a cluster that wants a token has it: the cause is the last line of a traceback within a text."""

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
    """A line never ends with nothing."""

    def fail(**_options):
        raise OSError

    monkeypatch.setattr(ray, "init", fail)
    assert "runtime.ray.address: cannot join the cluster at auto: OSError" == refusal("auto")
