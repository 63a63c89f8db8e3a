"""Slow, half, oversized, broken and pipelined requests, over raw sockets."""

import json
import socket

import pytest

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi."}]}).encode()
SIZE = len(BODY)


def head(gateway, *lines, host="127.0.0.1", key=None, length=SIZE):
    """The head of a call, with some header lines added."""
    fixed = ["POST /s/s-1/v1/chat/completions HTTP/1.1", f"Authorization: Bearer {key or gateway.key}"]
    sized = [] if length is None else [f"Content-Length: {length}"]
    named = [] if host is None else [f"Host: {host}"]
    return "\r\n".join([*fixed, *named, *sized, *lines, "", ""]).encode("latin-1")


class Probe:
    """A raw connection to a gateway."""

    def __init__(self, gateway):
        self._socket = socket.create_connection(("127.0.0.1", gateway.server.port), timeout=600)

    def send(self, data):
        self._socket.sendall(data)

    def read(self, num_responses=1):
        """Read until some responses are here or the server closes; return their statuses and all text."""
        text = b""
        while self._count(text) < num_responses and (part := self._socket.recv(65536)):
            text += part
        return self._statuses(text), text

    def read_to_end(self):
        """Read until the server closes."""
        text = b""
        while part := self._socket.recv(65536):
            text += part
        return self._statuses(text), text

    @staticmethod
    def _statuses(text):
        return [int(each[:3]) for each in text.split(b"HTTP/1.1 ")[1:]] or [
            int(each[:3]) for each in text.split(b"HTTP/1.0 ")[1:]
        ]

    @staticmethod
    def _count(text):
        """The number of whole responses in a text."""
        count = 0
        while b"\r\n\r\n" in text:
            top, _, text = text.partition(b"\r\n\r\n")
            sizes = [int(line.split(b":")[1]) for line in top.lower().split(b"\r\n") if b"content-length" in line]
            if len(text) < sum(sizes):
                break
            count, text = count + 1, text[sum(sizes) :]
        return count

    def close(self):
        self._socket.close()


@pytest.fixture
def probe():
    """Opens raw connections, and closes them after the test."""
    opened = []

    def connect(gateway):
        opened.append(Probe(gateway))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def status_of(probe, gateway, data):
    connection = probe(gateway)
    connection.send(data)
    statuses, text = connection.read()
    assert b"Traceback" not in text
    return statuses


def test_a_malformed_head_stays_out_of_the_log(probe, gateway, caplog, capfd):
    """A head that cannot be parsed is refused, and no log has the key in it."""
    text = f"POST /s/s-1/v1/messages HTTP/1.1\nHost: 127.0.0.1\nAuthorization: Bearer {gateway.key}\n\n"
    assert [400] == status_of(probe, gateway, text.encode())

    assert ["a malformed request was refused: BadStatusLine"] == [record.getMessage() for record in caplog.records]
    assert gateway.key not in caplog.text + "".join(capfd.readouterr())


def test_good_request(probe, gateway):
    """The probes' request is served, so that each difference below is the reason for its status."""
    assert [200] == status_of(probe, gateway, head(gateway) + BODY)


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        (["Host: 127.0.0.1"], "127.0.0.1"),
        ([], None),
        ([], "evil.example"),
        ([], "evil.example:127"),
        ([], "localhost:1@evil.example"),
        ([], "localhost:evil.example"),
        ([], "localhost/evil.example"),
        ([], "[::1].evil.example"),
        ([], "[::1]@evil.example"),
        ([], "10.1.2.3"),
        ([], "127.0.0.1.evil.example"),
        (["Transfer-Encoding: chunked"], "127.0.0.1"),
        (["Content-Length: 3"], "127.0.0.1"),
        ([" folded"], "127.0.0.1"),
        (["X-Long: " + "x" * 70_000], "127.0.0.1"),
        ([f"X-{number}: 1" for number in range(10_000)], "127.0.0.1"),
    ],
)
def test_bad_heads_are_refused(probe, gateway, lines, host):
    """Two or no hosts, unknown hosts, contradicting lengths, folded lines and huge heads: 400, and no call."""
    assert [400] == status_of(probe, gateway, head(gateway, *lines, host=host) + BODY)
    assert [] == gateway.backend.calls


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "[::1]:8", "127.0.0.2"])
def test_names_of_this_machine_are_hosts(probe, gateway, host):
    """Every name and address of the machine itself is accepted."""
    assert [200] == status_of(probe, gateway, head(gateway, host=host) + BODY)


@pytest.mark.parametrize("chunks", [b"zz\r\nhi\r\n0\r\n\r\n", b"2\r\nhiX\r\n0\r\n\r\n", b"-1\r\nhi\r\n0\r\n\r\n"])
def test_bad_chunks_are_refused(probe, gateway, chunks):
    """Bytes that break the chunked framing are a 400."""
    top = head(gateway, "Transfer-Encoding: chunked", length=None)

    assert [400] == status_of(probe, gateway, top + chunks)
    assert [] == gateway.backend.calls


def test_chunked_body(probe, gateway):
    """A body in chunks is served."""
    top = head(gateway, "Transfer-Encoding: chunked", length=None)
    chunks = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])

    assert [200] == status_of(probe, gateway, top + chunks)


def test_oversized_body_is_drained(probe, serve):
    """A body over the limit is read to its end, and then refused with 413 that the client can read."""
    gateway = serve(max_body_bytes=1000)
    connection = probe(gateway)
    connection.send(head(gateway, length=3_000_000))
    for _ in range(30):
        connection.send(b" " * 100_000)
    statuses, text = connection.read()

    assert [413] == statuses
    assert b"x-should-retry: false" in text
    assert [] == gateway.backend.calls


def test_oversized_chunks_are_drained(probe, serve):
    """A body of unknown length is counted while it comes."""
    gateway = serve(max_body_bytes=1000)
    chunk = b"%x\r\n%s\r\n" % (4000, b" " * 4000)

    top = head(gateway, "Transfer-Encoding: chunked", length=None)
    assert [413] == status_of(probe, gateway, top + chunk * 50 + b"0\r\n\r\n")


def test_body_of_a_refused_call_is_drained(probe, gateway):
    """A client that sends a long body with a wrong key can read the 401."""
    connection = probe(gateway)
    connection.send(head(gateway, key="wrong", length=3_000_000))
    for _ in range(30):
        connection.send(b" " * 100_000)

    assert [401] == connection.read()[0]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_compressed_bodies_are_refused(probe, gateway, encoding):
    """A compressed body is a 415: unpacked, it could have any size."""
    assert [415] == status_of(probe, gateway, head(gateway, f"Content-Encoding: {encoding}") + BODY)


def test_expected_continue(probe, gateway):
    """A client that waits for permission to send its body gets it."""
    connection = probe(gateway)
    connection.send(head(gateway, "Expect: 100-continue"))
    assert [100] == connection.read()[0]
    connection.send(BODY)

    assert [200] == connection.read()[0]


def test_silent_connection_is_closed(probe, serve):
    """A connection without a byte ends at the deadline of receipt."""
    connection = probe(serve(receive_s=0.1))

    assert ([], b"") == connection.read_to_end()


def test_half_head_is_closed(probe, serve):
    """A head that does not end is cut at the deadline of receipt."""
    gateway = serve(receive_s=0.1)
    connection = probe(gateway)
    connection.send(head(gateway)[:-5])

    assert ([], b"") == connection.read_to_end()
    assert [] == gateway.backend.calls


def test_half_body_is_closed(probe, serve):
    """A body that does not end is a 408 that no client repeats, and the connection closes."""
    for receive_s in (0.1, 1.0, 30.0):  # the first in which a busy machine receives the head
        gateway = serve(receive_s=receive_s)
        connection = probe(gateway)
        connection.send(head(gateway) + BODY[:-1])
        statuses, text = connection.read_to_end()
        if statuses:
            break

    assert [408] == statuses
    assert b"x-should-retry: false" in text
    assert [] == gateway.backend.calls


def test_long_call_outlives_the_deadline_of_receipt(probe, serve):
    """The deadline ends with the receipt: a slow model is no slow client."""
    gateway = serve(receive_s=0.1, heartbeat_s=0.05)
    gateway.hold()
    connection = probe(gateway)
    body = BODY[:-1] + b', "stream": true}'
    connection.send(head(gateway, length=len(body)) + body)
    text = b""
    while text.count(b": ping") < 4:
        text += connection._socket.recv(65536)
    gateway.let_go()

    while b"[DONE]" not in text:
        text += connection._socket.recv(65536)


def test_pipelined_requests_are_answered_in_order(probe, gateway, make_reply):
    """Requests that came at once on one connection are answered one after the other."""
    gateway.backend.script = lambda call: make_reply(content=f"To {call.messages[0]['content']}.")
    connection = probe(gateway)
    bodies = [BODY.replace(b"Hi.", name) for name in (b"one", b"two", b"six")]
    connection.send(b"".join(head(gateway, length=len(body)) + body for body in bodies))
    statuses, text = connection.read(3)

    assert [200, 200, 200] == statuses
    assert text.index(b"To one.") < text.index(b"To two.") < text.index(b"To six.")


def test_old_protocol_is_refused(probe, gateway):
    """HTTP/1.0 marks no end of a stream, so its calls are refused."""
    assert [400] == status_of(probe, gateway, (head(gateway) + BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert [] == gateway.backend.calls


@pytest.mark.parametrize(
    "path",
    [
        "/s/s-1/../s-1/v1/models",
        "/s/%73-1/v1/models",
        "/s/s-1%2f/v1/models",
        "/s//v1/models",
        "/s/" + "x" * 65 + "/v1/models",
        "//v1/models",
        "/v1/models%00",
    ],
)
def test_odd_paths_have_no_route(probe, gateway, path):
    """Paths are compared as they come: nothing is decoded or resolved."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gateway.key}\r\n\r\n"

    assert [404] == status_of(probe, gateway, request.encode())
