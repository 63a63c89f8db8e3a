"""The remote backend, against a small server that acts as a SandboxFusion service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Status, Tier, remote_backend
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits

LIMITS = Limits(timeout_s=1.0, memory_mb=64, max_output_bytes=20, cpu_s=3, disk_mb=1, max_files=1)
JOB = Job(code=b"", stdin=b"", limits=LIMITS, tier=Tier.REMOTE)


class Service(ThreadingHTTPServer):
    """Sends its `responses` in order, and repeats the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.responses: list[tuple[int, bytes]] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.barrier = threading.Barrier(1)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Service

    def do_POST(self) -> None:
        """Record the request and send the next response."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append({"path": self.path, **json.loads(body)})
        self.server.headers.append(dict(self.headers))
        self.server.barrier.wait(60)
        status, body = self.server.responses.pop(0) if len(self.server.responses) > 1 else self.server.responses[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Log nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A running service."""
    made = Service()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def build_response(status: object = "Finished", code: object = 0, **more: object) -> bytes:
    """Return a response in the service's format."""
    run = {"status": status, "return_code": code, "stdout": "", "stderr": "", "execution_time": 0.25, **more}
    return json.dumps({"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run}).encode()


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (build_response(stdout="4\n"), Status.OK),
        (build_response(code=1, stderr="Traceback"), Status.ERROR),
        (build_response("Error", None), Status.ERROR),
        (build_response("TimeLimitExceeded", None), Status.TIMEOUT),
        (build_response(stdout="x" * 5000), Status.OUTPUT_LIMIT),
        (build_response("SomethingElse", 0), Status.INFRA_ERROR),
        (b'{"status": "SandboxError", "message": "no workers", "run_result": null}', Status.INFRA_ERROR),
        (b"<html>", Status.INFRA_ERROR),
        (b"[]", Status.INFRA_ERROR),
        (build_response(["Finished"]), Status.INFRA_ERROR),
        (build_response({}), Status.INFRA_ERROR),
        (build_response(code=[0]), Status.INFRA_ERROR),
        (build_response(execution_time=[1]), Status.OK),
        (build_response(execution_time="soon", stdout=["a"]), Status.OK),
        (b"[" * 200_000, Status.INFRA_ERROR),
        (b"", Status.INFRA_ERROR),
    ],
)
def test_responses_become_results(service: Service, response: bytes, status: Status) -> None:
    """A response about the program becomes its status; any other response is `infra_error`."""
    service.responses = [(200, response)]
    with Sandbox(remote_url=service.url, max_output_bytes=4096) as sandbox:
        result = sandbox.run("print(2 + 2)")

    assert (status, Tier.REMOTE) == (result.status, result.tier)
    assert len(result.stdout) <= 4096


def test_the_request_is_complete(service: Service, monkeypatch) -> None:
    """The request has the program, its input, its limits and the token."""
    service.responses = [(200, build_response())]
    monkeypatch.setenv("FUSION_TOKEN", "abc")
    with Sandbox(remote_url=service.url + "/", remote_token_env="FUSION_TOKEN") as sandbox:
        sandbox.run("x", timeout_s=3, memory_mb=99, stdin="in")

    (request,) = service.requests
    expected = {"path": "/run_code", "code": "x", "language": "python", "run_timeout": 3, "memory_limit_MB": 99}
    assert expected | {"stdin": "in"} == request
    assert "Bearer abc" == service.headers[0]["Authorization"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_retried(service: Service, status: int) -> None:
    """A request that the service refused as busy is sent again."""
    service.responses = [(status, b""), (200, build_response(stdout="ok"))]
    with Sandbox(remote_url=service.url) as sandbox:
        assert "ok" == sandbox.run("x").stdout
    assert len(service.requests) == 2


def test_a_broken_service_is_not_retried(service: Service) -> None:
    """A request that may have run the program is not sent again."""
    service.responses = [(500, b"")]
    with Sandbox(remote_url=service.url) as sandbox:
        result = sandbox.run("x")

    assert Status.INFRA_ERROR is result.status
    assert "500" in result.stderr
    assert len(service.requests) == 1


def test_a_missing_service_is_an_infrastructure_error() -> None:
    """A refused connection is `infra_error`, with the address."""
    with Sandbox(remote_url="http://127.0.0.1:9") as sandbox:
        result = sandbox.run("x")

    assert Status.INFRA_ERROR is result.status
    assert "127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8080"])
def test_only_http_urls_are_accepted(url: str) -> None:
    """Any other URL is a `ConfigError` that names the option."""
    with pytest.raises(ConfigError, match="remote_url"):
        Sandbox(remote_url=url).start()


def test_an_unset_token_variable_is_a_config_error() -> None:
    """The error names the environment variable."""
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN"):
        Sandbox(remote_url="http://127.0.0.1:9", remote_token_env="NO_SUCH_TOKEN").start()


def test_a_service_that_stays_busy_is_an_infrastructure_error(service: Service, monkeypatch) -> None:
    """After the last retry the result has the HTTP status."""
    monkeypatch.setattr(remote_backend, "_RETRY_DELAYS_S", (0.0, 0.0))
    service.responses = [(503, b"")]
    with Sandbox(remote_url=service.url) as sandbox:
        result = sandbox.run("x")

    assert (Status.INFRA_ERROR, 3) == (result.status, len(service.requests))
    assert "503" in result.stderr


def test_an_oversized_response_is_an_infrastructure_error(service: Service, monkeypatch) -> None:
    """A response is read up to a limit only, and then dropped."""
    monkeypatch.setattr(remote_backend, "_MAX_RESPONSE_BYTES", 1000)
    service.responses = [(200, build_response(stdout="x" * 1000))]
    with Sandbox(remote_url=service.url) as sandbox:
        result = sandbox.run("x")

    assert (Status.INFRA_ERROR, "") == (result.status, result.stdout)
    assert "the response has more than 1000 bytes" in result.stderr


def test_a_redirect_does_not_leak_the_token(service: Service, monkeypatch) -> None:
    """A redirect of the request is an error; nothing is sent to the other address."""
    monkeypatch.setenv("FUSION_TOKEN", "abc")
    service.responses = [(307, b"")]
    with Sandbox(remote_url=service.url, remote_token_env="FUSION_TOKEN") as sandbox:
        result = sandbox.run("x")

    assert (Status.INFRA_ERROR, 1) == (result.status, len(service.requests))


def test_proxies_of_the_environment_are_not_used(service: Service, monkeypatch) -> None:
    """Code and token go to the service directly."""
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    service.responses = [(200, build_response(stdout="direct"))]
    with Sandbox(remote_url=service.url) as sandbox:
        assert "direct" == sandbox.run("x").stdout


def test_runs_go_out_at_the_same_time(service: Service) -> None:
    """Several calls do not wait for each other."""
    service.responses = [(200, build_response(stdout="ok"))]
    service.barrier = threading.Barrier(3)
    with Sandbox(remote_url=service.url, max_in_flight=3) as sandbox, ThreadPoolExecutor(3) as pool:
        outputs = [result.stdout for result in pool.map(sandbox.run, ["x", "y", "z"])]

    assert ["ok"] * 3 == outputs


def test_remote_runs_have_no_sessions(service: Service) -> None:
    """The error names the tier, and the tiers with sessions."""
    with (
        Sandbox(remote_url=service.url) as sandbox,
        pytest.raises(SandboxUnavailableError, match=r"tier 0 \(remote\) has no sessions; use tier 1 or 2"),
    ):
        sandbox.session()


@given(st.dictionaries(st.sampled_from(["status", "message", "run_result", "x"]), st.none() | st.text(max_size=5)))
def test_a_response_without_a_result_says_nothing(response: dict) -> None:
    """Whatever else the service sends, it is an error and not a verdict."""
    with pytest.raises(ValueError, match="no result"):
        remote_backend.parse_response(response, JOB, 1.0)


@given(
    status=st.sampled_from(["Finished", "Error", "TimeLimitExceeded"]),
    code=st.none() | st.integers(-5, 300),
    stdout=st.text(max_size=30),
    stderr=st.none() | st.text(max_size=30),
)
def test_a_result_keeps_to_the_limits(status: str, code: int | None, stdout: str, stderr: str | None) -> None:
    """Output is cut at the limit of the job, and only exit code 0, or none, is `ok`."""
    run = {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr}
    result = remote_backend.parse_response({"status": "Success", "run_result": run}, JOB, 1.0)

    assert (len(stdout.encode("utf-8", "replace")) + len((stderr or "").encode("utf-8", "replace")) > 20) is (
        result.status is Status.OUTPUT_LIMIT
    )
    if result.status is Status.OK:
        assert code in (0, None)
        assert status == "Finished"
    assert result.wall_s == 1.0
