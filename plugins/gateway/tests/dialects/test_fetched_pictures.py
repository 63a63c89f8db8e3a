"""Pictures by the URL of a server: only listed ones are asked, once, and each other answer has one line."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from picture_requests import DIALECTS, write_body, write_parts, write_url, write_user

from turnwise.media import picture_part
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import RequestMemory, find_dialect, read_exchange
from turnwise_gateway.limits import CallLimits, PictureLimits
from turnwise_gateway.session.options import SessionOptions
from turnwise_testing.inputs.vision import make_picture

CAT = make_picture(color="red")


class Handler(BaseHTTPRequestHandler):
    """Serves a picture, and answers that are none."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("authorization")))
        status, body, more = ANSWERS.get(self.path, (404, b"none", {}))
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments):
        """Print nothing."""


ANSWERS = {
    "/cat.png": (200, CAT.data, {}),
    "/moved": (302, b"", {"location": "/cat.png"}),
    "/page": (200, b"<html></html>", {}),
    "/short": (200, CAT.data[:50], {"content-length": str(len(CAT.data))}),
    "/empty": (204, b"", {}),
}


@pytest.fixture
def server(monkeypatch):
    """A server of files, which runs in a thread."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.asked = []
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def memory_of(*hosts):
    limits = PictureLimits(lambda _picture: None, 8, SessionOptions(picture_hosts=hosts).picture_hosts)
    return RequestMemory(CallLimits.of_context(1 << 16, limits))


def read(dialect, url, memory):
    message = write_user(dialect, [*write_parts(dialect, ["Look:"]), write_url(dialect, url)])
    body = json.dumps(write_body(dialect, [message])).encode()
    return read_exchange(find_dialect(dialect), body, {}, memory).call.messages


def refusal(dialect, url, memory):
    with pytest.raises(CallRefusedError) as refused:
        read(dialect, url, memory)
    assert "\n" not in refused.value.message
    return refused.value.message


def host_of(server):
    return f"127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_listed_server(server, dialect):
    """Its picture is in the message as bytes, and the session asks for it once."""
    memory, url = memory_of(host_of(server)), f"http://{host_of(server)}/cat.png"
    for _ in range(2):
        (message,) = read(dialect, url, memory)
        assert message["content"] == [{"type": "text", "text": "Look:"}, picture_part(CAT)]
    assert server.asked == [("/cat.png", None)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("hosts", [(), ("example.com",), ("127.0.0.1",), ("127.0.0.1:1",)])
def test_other_servers(server, dialect, hosts):
    """A server that is not listed with its port is not asked."""
    message = refusal(dialect, f"http://{host_of(server)}/cat.png", memory_of(*hosts))
    assert "not in agent.picture_hosts" in message if hosts else "none is fetched" in message
    assert server.asked == []


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("http://user:secret@{host}/cat.png", "has a user or a password"),
        ("http://example.com\\@{host}/cat.png", "has a user or a password"),
        ("http://{host}.example.com/cat.png", "cannot be read"),
        ("http://[{host}/cat.png", "cannot be read"),
        ("ftp://{host}/cat.png", "none is fetched"),
        ("file:///etc/hostname", "none is fetched"),
        ("//{host}/cat.png", "none is fetched"),
    ],
)
def test_urls_that_mislead(server, form, reason):
    """Their host is not the one that a reader sees, or they have another scheme."""
    assert reason in refusal("chat", form.format(host=host_of(server)), memory_of(host_of(server)))
    assert server.asked == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "answers with the status 302"),
        ("/none", "answers with the status 404"),
        ("/empty", "answers with the status 204"),
        ("/page", "is of no known type"),
        ("/short", "the answer ends too early"),
        ("/a b", "cannot be fetched: "),
    ],
)
def test_answers_that_are_no_picture(server, path, reason):
    """Each has one line; a redirect is not followed."""
    assert reason in refusal("chat", f"http://{host_of(server)}{path}", memory_of(host_of(server)))
    assert len(server.asked) <= 1


def test_large_answers(server, monkeypatch):
    """They are not read to their end."""
    monkeypatch.setattr("turnwise_gateway.dialects.fetched_pictures.MAX_PICTURE_BYTES", 20)
    assert "has more than 20 bytes" in refusal("chat", f"http://{host_of(server)}/cat.png", memory_of(host_of(server)))


def test_a_server_that_is_gone(server):
    """The line has the reason."""
    memory, url = memory_of(host_of(server)), f"http://{host_of(server)}/cat.png"
    server.server_close()
    server.shutdown()
    assert "cannot be fetched: " in refusal("chat", url, memory)


@pytest.mark.parametrize("host", ["https://example.com", "Example.com", "example.com/a", "*.example.com", "", "a:b"])
def test_hosts_that_are_none(host):
    """The config says so."""
    with pytest.raises(ValueError, match="no host in small letters"):
        SessionOptions(picture_hosts=(host,))
