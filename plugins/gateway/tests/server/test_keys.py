"""Keys: two headers, compared as bytes; a wrong one creates nothing and is written nowhere."""

import http.client
import json
import urllib.error
import urllib.request
import weakref

import pytest
import structlog

from turnwise.errors import ConfigError
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.server import ServerOptions, SessionDirectory

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi."}]}).encode()


def status(url, headers):
    """Send a call and return its status."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", BODY, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key"])
def test_both_headers_have_keys(gateway, name):
    """Either header may have the key, with the session in the path or without."""
    value = f"bearer {gateway.key}" if name == "Authorization" else gateway.key

    assert 200 == status(gateway.url, {name: value})
    assert 200 == status(gateway.server.url(), {name: value})


def test_one_good_key_is_enough(gateway):
    """A client with keys in both headers is let in by the right one."""
    assert 200 == status(gateway.url, {"Authorization": "Bearer other", "X-Api-Key": gateway.key})
    assert 200 == status(gateway.url, {"Authorization": f"Bearer {gateway.key}", "X-Api-Key": "other"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic {key}"},
        {"Authorization": "{key}"},
        {"Authorization": "Bearer {key}x"},
        {"Authorization": "Bearer k\xe9y"},
        {"X-Api-Key": "\xff\xfe"},
        {"X-Api-Key": "{key}, {key}"},
    ],
)
def test_wrong_keys_create_nothing(gateway, headers):
    """Every other key is a 401, the session sees no call, and the directory has no further session."""
    values = {name: value.replace("{key}", gateway.key) for name, value in headers.items()}

    assert 401 == status(gateway.url, values)
    assert 401 == status(gateway.server.url("s-2"), values)
    assert [] == gateway.backend.calls
    assert ["s-1"] == list(gateway.directory._by_id)


def test_key_is_of_one_session(gateway):
    """The key of one session opens no other one, not even under a path that exists."""
    other = gateway.directory.add("s-2", gateway.backend)

    assert 401 == status(gateway.url, {"X-Api-Key": other})
    assert 200 == status(gateway.server.url("s-2"), {"X-Api-Key": other})


def test_forgotten_session(gateway):
    """A forgotten session's key is unknown."""
    gateway.directory.forget("s-1")

    assert 401 == status(gateway.url, {"X-Api-Key": gateway.key})
    assert 401 == status(gateway.server.url(), {"X-Api-Key": gateway.key})


@pytest.mark.parametrize("session_id", ["", "a/b", "..", "x" * 65, "a\n", "é"])
def test_session_ids_are_parts_of_urls(session_id, gateway):
    """An id that does not fit into a path is refused, and so is one that is in use."""
    directory = SessionDirectory("tiny")
    with pytest.raises(ValueError, match="a session id has 1 to 64"):
        directory.add(session_id, gateway.backend)
    directory.add("a", gateway.backend)
    with pytest.raises(ValueError, match="already"):
        directory.add("a", gateway.backend)


def test_keys_and_texts_are_in_no_log(gateway):
    """A call writes one line, without keys and without texts."""
    with structlog.testing.capture_logs() as lines:
        assert 200 == status(gateway.url, {"X-Api-Key": gateway.key})
        assert 401 == status(gateway.url, {"X-Api-Key": "wrong-key"})
        gateway.stop()

    assert ["delivered", "unauthorized"] == [line["outcome"] for line in lines]
    assert [200, 401] == [line["status"] for line in lines]
    assert not any(word in str(lines) for word in (gateway.key, "wrong-key", "Hi.", "Hello."))


def test_session_gets_no_keys(gateway):
    """The headers that a session sees have no key."""
    assert 200 == status(gateway.url, {"X-Api-Key": gateway.key, "X-Session-Id": "abc"})

    headers = gateway.backend.calls[0].headers
    assert "abc" == headers["x-session-id"]
    assert gateway.key not in str(headers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_permission(host):
    """Addresses that other machines reach need `allow_remote`."""
    with pytest.raises(ConfigError, match="allow_remote"):
        ServerOptions(host=host)
    assert host == ServerOptions(host=host, allow_remote=True).host


@pytest.mark.parametrize(("host", "fine"), [("10.1.2.3:80", True), ("gpu-1:80", True), ("evil.example", False)])
def test_hosts_of_a_remote_server(refused, host, fine):
    """A server for other machines accepts addresses and its own names."""
    options = ServerOptions(host="0.0.0.0", allow_remote=True, hosts=("gpu-1",))
    if fine:
        options.check_host([host])
    else:
        with pytest.raises(refused, match="Host"):
            options.check_host([host])


class Check:
    """Admits connections, or fails, as a test says; it notes those that it was asked about."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def admits(self, client, server):
        self.asked.append(client)
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def post(connection, path, key):
    """Send a call in a connection that stays open, and return its status."""
    connection.request("POST", path, BODY, {"X-Api-Key": key})
    response = connection.getresponse()
    response.read()
    return response.status


def test_a_check_is_asked_once_for_each_connection(gateway):
    """A connection that a session has admitted is not looked at again, unless it comes with the key of another one."""
    checks = Check(True), Check(True)
    other = type(gateway.backend)()
    keys = gateway.key, gateway.directory.add("s-2", other)
    for backend, check in zip((gateway.backend, other), checks, strict=True):
        gateway.server.bind(backend, check)
    connections = [http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=600) for _ in range(2)]

    for number in (0, 0, 1, 1):
        assert [200, 200] == [post(each, "/v1/chat/completions", keys[number]) for each in connections]

    assert [2, 2] == [len(set(check.asked)) for check in checks] == [len(check.asked) for check in checks]
    for each in connections:
        each.close()


@pytest.mark.parametrize(("answer", "expected"), [(False, 403), (OSError(24, "Too many open files"), 429)])
def test_a_connection_that_is_not_admitted_reaches_no_session(gateway, answer, expected):
    """A connection without permission is refused at each of its requests; without descriptors it may try again."""
    gateway.server.bind(gateway.backend, check := Check(answer))
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=600)

    assert [expected] * 2 == [post(connection, "/v1/chat/completions", gateway.key) for _ in range(2)]
    assert ([], []) == (gateway.backend.calls, gateway.backend.refusals)
    assert 2 == len(check.asked)
    connection.close()


class EndedBackend:
    """A session that is over."""


def test_the_end_of_a_session_frees_it():
    """Its key is known until it is forgotten, and its records need not be kept for that."""
    directory, backend = SessionDirectory("m"), EndedBackend()
    key, freed = directory.add("s-1", backend).encode(), weakref.ref(backend)
    assert backend is directory.find(key, "s-1")

    directory.end("s-1")
    del backend

    assert freed() is None
    assert directory.find(b"another key", "s-1") is None
    for name in ("s-1", None):
        with pytest.raises(CallRefusedError) as refused:
            directory.find(key, name)
        assert "session_closed" == refused.value.kind
    directory.forget("s-1")
    assert directory.find(key, "s-1") is None
