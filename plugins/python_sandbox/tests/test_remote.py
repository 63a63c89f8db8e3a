"""A SandboxFusion service, played by a small server on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from turnwise.errors import ConfigError
from turnwise_python_sandbox import Sandbox, Status, Tier


class Service(ThreadingHTTPServer):
    """Answers with what `answers` holds, in order, the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Service

    def do_POST(self) -> None:
        """Keep what was asked and answer."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append({"path": self.path, **json.loads(body)})
        self.server.headers.append(dict(self.headers))
        time.sleep(self.server.delay_s)
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A service that runs."""
    made = Service()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def finished(status: str = "Finished", code: int | None = 0, **more: object) -> bytes:
    """An answer in the service's form."""
    run = {"status": status, "return_code": code, "stdout": "", "stderr": "", "execution_time": 0.25, **more}
    return json.dumps({"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run}).encode()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (finished(stdout="4\n"), Status.OK),
        (finished(code=1, stderr="Traceback"), Status.ERROR),
        (finished("Error", None), Status.ERROR),
        (finished("TimeLimitExceeded", None), Status.TIMEOUT),
        (finished(stdout="x" * 5000), Status.OUTPUT_LIMIT),
        (finished("SomethingElse", 0), Status.INFRA_ERROR),
        (b'{"status": "SandboxError", "message": "no workers", "run_result": null}', Status.INFRA_ERROR),
        (b"<html>", Status.INFRA_ERROR),
        (b"[]", Status.INFRA_ERROR),
        (b"", Status.INFRA_ERROR),
    ],
)
def test_answers_are_understood(service: Service, answer: bytes, status: Status) -> None:
    """What says something about the program is a verdict; everything else is the infrastructure's fault."""
    service.answers = [(200, answer)]
    with Sandbox(remote_url=service.url, max_output_bytes=4096) as sandbox:
        result = sandbox.run("print(2 + 2)")

    assert (status, Tier.REMOTE) == (result.status, result.tier)
    assert len(result.stdout) <= 4096


def test_what_is_asked(service: Service, monkeypatch) -> None:
    """The request has the program, its input and its limits, and the token when there is one."""
    service.answers = [(200, finished())]
    monkeypatch.setenv("FUSION_TOKEN", "abc")
    with Sandbox(remote_url=service.url + "/", remote_token_env="FUSION_TOKEN") as sandbox:
        sandbox.run("x", timeout_s=3, memory_mb=99, stdin="in")

    (asked,) = service.asked
    expected = {"path": "/run_code", "code": "x", "language": "python", "run_timeout": 3, "memory_limit_MB": 99}
    assert expected | {"stdin": "in"} == asked
    assert "Bearer abc" == service.headers[0]["Authorization"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_asked_again(service: Service, status: int) -> None:
    """A service that refuses for now has run nothing."""
    service.answers = [(status, b""), (200, finished(stdout="ok"))]
    with Sandbox(remote_url=service.url) as sandbox:
        assert "ok" == sandbox.run("x").stdout
    assert len(service.asked) == 2


def test_a_broken_service_is_not_asked_again(service: Service) -> None:
    """What may have run is not run twice."""
    service.answers = [(500, b"")]
    with Sandbox(remote_url=service.url) as sandbox:
        result = sandbox.run("x")

    assert Status.INFRA_ERROR is result.status
    assert "500" in result.stderr
    assert len(service.asked) == 1


def test_no_service_is_an_infrastructure_error() -> None:
    """Nobody listens: not the program's fault."""
    with Sandbox(remote_url="http://127.0.0.1:9") as sandbox:
        result = sandbox.run("x")

    assert Status.INFRA_ERROR is result.status
    assert "127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8080"])
def test_only_http_is_spoken(url: str) -> None:
    """An address that is none is a mistake in the config."""
    with pytest.raises(ConfigError, match="remote_url"):
        Sandbox(remote_url=url).start()


def test_a_token_that_is_not_set_is_a_config_error() -> None:
    """The variable's name is told, no value."""
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN"):
        Sandbox(remote_url="http://127.0.0.1:9", remote_token_env="NO_SUCH_TOKEN").start()
