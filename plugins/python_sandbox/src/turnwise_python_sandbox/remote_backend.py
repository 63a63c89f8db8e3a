"""Runs code on a SandboxFusion service (https://github.com/bytedance/SandboxFusion) by ``POST /run_code``."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from turnwise.errors import ConfigError
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.output import CapturedOutput
from turnwise_python_sandbox.result import RunResult, Status, Tier

_GRACE_S: Final = 10.0
"""For the service and the network, in addition to the program's own limit."""
_MAX_RESPONSE_BYTES: Final = 64 * 2**20
_RETRY_DELAYS_S: Final = (0.2, 1.0)
_RETRIED_HTTP_STATUSES: Final = (429, 502, 503, 504)
_STATUSES: Final = {
    "Finished": Status.OK,
    "Error": Status.ERROR,
    "TimeLimitExceeded": Status.TIMEOUT,
}


class RemoteBackend:
    """
    Sends each job to a service.

    Failures of the service or the network are `infra_error`, never the program's failure.

    Args:
        config: with `remote_url`.

    Raises:
        ConfigError: the URL is invalid, or the environment variable of the token is not set.
    """

    tier: Final = Tier.REMOTE

    def __init__(self, config: SandboxConfig) -> None:
        if not config.remote_url.startswith(("http://", "https://")):
            raise ConfigError(f"remote_url is {config.remote_url!r}, but must start with http:// or https://")
        self._url = config.remote_url.rstrip("/") + "/run_code"
        self._headers = {"Content-Type": "application/json", **_build_authorization(config.remote_token_env)}
        self._threads = ThreadPoolExecutor(config.capacity, thread_name_prefix="turnwise-sandbox")
        self._closed = threading.Event()
        # No proxy: one from the environment would see the code and the token.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def submit(self, job: Job) -> None:
        self._threads.submit(self._run, job)

    def kill(self, job: Job) -> None:
        """Do nothing: the service ends the program at its time limit."""

    def close(self) -> None:
        # Jobs that are left are not retried.
        self._closed.set()
        self._threads.shutdown(wait=True)

    def detach_after_fork(self) -> None:
        """Do nothing: a child shares nothing with its parent."""

    def _run(self, job: Job) -> None:
        job.sent_at = time.monotonic()
        try:
            result = parse_response(self._request(job), job, time.monotonic() - job.sent_at)
        except Exception as error:  # noqa: BLE001 - every job must be resolved, whatever the service has sent
            job.fail(f"the service at {self._url} failed: {type(error).__name__}: {error}")
        else:
            job.resolve(result)

    def _request(self, job: Job) -> Any:
        """Post a job, retry while the service is busy, and return the JSON value of the response."""
        body = json.dumps(
            {
                "code": job.code.decode("utf-8", "surrogatepass"),
                "language": "python",
                "run_timeout": job.limits.timeout_s,
                "memory_limit_MB": job.limits.memory_mb,
                "stdin": job.stdin.decode("utf-8", "surrogatepass"),
            }
        ).encode()
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return self._post(body, job.limits.timeout_s + _GRACE_S)
            except urllib.error.HTTPError as error:
                # With these statuses the service has run nothing, so that a retry cannot run a program twice.
                if error.code not in _RETRIED_HTTP_STATUSES or delay_s is None or self._closed.wait(delay_s):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, timeout_s: float) -> Any:
        request = urllib.request.Request(self._url, body, self._headers)
        with self._opener.open(request, timeout=timeout_s) as response:
            data = response.read(_MAX_RESPONSE_BYTES + 1)
        if len(data) > _MAX_RESPONSE_BYTES:
            raise ValueError(f"the response has more than {_MAX_RESPONSE_BYTES} bytes")
        return json.loads(data)


def _build_authorization(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"remote_token_env is {variable!r}, but that environment variable is not set")
    return {"Authorization": f"Bearer {token}"}


def parse_response(response: Any, job: Job, wall_s: float) -> RunResult:
    """
    Return the result in a service's response.

    Args:
        response: the JSON value.
        job: the job that was sent.
        wall_s: seconds until the response, used if the service does not report the program's own.

    Raises:
        ValueError: the response says nothing about the program.
    """
    run = response.get("run_result") if isinstance(response, Mapping) else None
    if not isinstance(run, Mapping) or response.get("status") == "SandboxError":
        message = response.get("message") if isinstance(response, Mapping) else response
        raise ValueError(f"no result: {str(message)[:200]}")
    if not isinstance(run.get("status"), str) or run["status"] not in _STATUSES:
        raise ValueError(f"unknown status {run.get('status')!r}")
    code = run.get("return_code")
    if not isinstance(code, int | None):
        raise ValueError(f"the exit code is {str(code)[:200]!r}")  # noqa: TRY004 - the service's fault, not a caller's
    status = _STATUSES[run["status"]]
    if status is Status.OK and code not in (0, None):
        status = Status.ERROR
    output = CapturedOutput(job.limits.max_output_bytes)
    for stream in ("stdout", "stderr"):
        output.add(stream, str(run.get(stream) or "").encode("utf-8", "replace"))
    return RunResult(
        status=Status.OUTPUT_LIMIT if output.truncated else status,
        stdout=output.text("stdout"),
        stderr=output.text("stderr"),
        exit_code=code,
        wall_s=_read_seconds(run.get("execution_time"), wall_s),
        tier=job.tier,
        queued_s=job.sent_at - job.submitted_at,
    )


def _read_seconds(value: object, default: float) -> float:
    """Return a positive number that the service has reported, otherwise the default."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return default
