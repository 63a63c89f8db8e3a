"""Access to the server: the token, the names of the machine, and the headers of every response."""

import asyncio
import gc
import socket
import urllib.parse

import pytest
from viewer_runs import GUARD_S, build_episode, write_run

from turnwise_viewer.viewer_server import ViewerServer


@pytest.fixture
def client(tmp_path, serve):
    """A client of a run with one episode."""
    return serve(write_run(tmp_path, [build_episode()]))


@pytest.mark.parametrize("path", ["", "app.js", "app.css", "icon.svg", "api/v1/runs", "nothing"])
def test_every_response_forbids_foreign_code(client, path):
    """Every response, also an error, has a policy without inline script, foreign sources and frames."""
    _status, _body, headers = client.ask(path)

    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")


@pytest.mark.parametrize("token", ["", "wrong", "%00", "..", "ö"])
def test_a_request_needs_the_token(client, token):
    """Without the token there is neither a page nor data."""
    parts = urllib.parse.urlsplit(client.url)
    client.url = f"{parts.scheme}://{parts.netloc}/"

    for path in ("", "app.js", "api/v1/runs"):
        status, body, _headers = client.ask(f"{urllib.parse.quote(token, safe='%')}/{path}")
        assert status == 404
        assert b"token" in body


def test_another_name_of_this_machine_is_refused(client):
    """A site that gives its own name to this machine gets nothing, even with the token."""
    status, _body, _headers = client.ask("api/v1/runs", headers={"Host": "evil.example:80"})

    assert status == 403


def test_the_address_is_on_loopback_and_differs(tmp_path, serve):
    """Two servers have two tokens, and both listen on loopback."""
    run = write_run(tmp_path, [build_episode()])
    urls = [urllib.parse.urlsplit(serve(run).url) for _ in range(2)]

    assert {url.hostname for url in urls} == {"127.0.0.1"}
    assert urls[0].path != urls[1].path
    assert min(len(url.path) for url in urls) > 24


@pytest.mark.parametrize("passes", range(6))
def test_a_connection_that_comes_at_the_end_is_closed(passes):
    """A page that connects while the server stops gets an end or a reset, and no transport is left open."""

    async def connect_and_stop() -> bytes:
        server = ViewerServer([])
        await server.start()
        with socket.create_connection(("127.0.0.1", server.address.port), timeout=GUARD_S) as page:
            for _ in range(passes):
                await asyncio.sleep(0)
            await server.stop()
            try:
                return await asyncio.to_thread(page.recv, 1)
            except ConnectionResetError:
                return b""

    assert asyncio.run(connect_and_stop()) == b""
    gc.collect()  # an open transport warns when it is freed, and pytest makes an error of it
