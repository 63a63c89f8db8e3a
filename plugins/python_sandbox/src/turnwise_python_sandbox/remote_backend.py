"""Runs code on a SandboxFusion service (https://github.com/bytedance/SandboxFusion), by its ``POST /run_code``."""

from __future__ import annotations

import http.client
import itertools
import json
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
from turnwise_python_sandbox.job import Job, Output
from turnwise_python_sandbox.result import RunResult, Status

_GRACE_S: Final = 10.0
"""Beyond a program's own limit, for the service and the network."""
_MAX_ANSWER_BYTES: Final = 64 * 2**20
_PAUSES_S: Final = (0.2, 1.0)
_AGAIN: Final = (429, 502, 503, 504)
_STATUSES: Final = {
    "Finished": Status.OK,
    "Error": Status.ERROR,
    "TimeLimitExceeded": Status.TIMEOUT,
}


class RemoteRuns:
    """
    Sends each job to a service.

    Whatever is wrong with the service or the way to it is the status ``infra_error``, never the program's fault.

    Args:
        config: with `remote_url`.

    Raises:
        ConfigError: the address is none, or the variable of the token is not set.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if not config.remote_url.startswith(("http://", "https://")):
            raise ConfigError(f"remote_url must begin with http:// or https://, not {config.remote_url!r}")
        self._url = config.remote_url.rstrip("/") + "/run_code"
        self._headers = {"Content-Type": "application/json", **_authorization(config.remote_token_env)}
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(config.capacity, thread_name_prefix="turnwise-sandbox")
        self._closed = threading.Event()
        # Proxies of the environment would see code and answers.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def number(self) -> int:
        """Return a new job's number."""
        return next(self._numbers)

    def submit(self, job: Job) -> None:
        """Send it from a thread."""
        self._threads.submit(self._run, job)

    def kill(self, job: Job) -> None:
        """Do nothing: the service ends it at its limit."""

    def close(self) -> None:
        """Answer what is left."""
        self._closed.set()
        self._threads.shutdown(wait=True)

    def forget(self) -> None:
        """Nothing is shared with a child."""

    def _run(self, job: Job) -> None:
        job.sent_at = time.monotonic()
        try:
            result = read_answer(self._ask(job), job, time.monotonic() - job.sent_at)
        except (OSError, http.client.HTTPException, ValueError) as error:
            job.fail(f"the service at {self._url} failed: {type(error).__name__}: {error}")
        else:
            job.settle(result)

    def _ask(self, job: Job) -> Any:
        body = json.dumps(
            {
                "code": job.code.decode("utf-8", "surrogatepass"),
                "language": "python",
                "run_timeout": job.limits.timeout_s,
                "memory_limit_MB": job.limits.memory_mb,
                "stdin": job.stdin.decode("utf-8", "surrogatepass"),
            }
        ).encode()
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._post(body, job.limits.timeout_s + _GRACE_S)
            except urllib.error.HTTPError as error:
                # Nothing was run: asking again cannot run a program twice.
                if error.code not in _AGAIN or pause_s is None or self._closed.wait(pause_s):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, timeout_s: float) -> Any:
        request = urllib.request.Request(self._url, body, self._headers)
        with self._opener.open(request, timeout=timeout_s) as answer:
            data = answer.read(_MAX_ANSWER_BYTES + 1)
        if len(data) > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        return json.loads(data)


def _authorization(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"remote_token_env names {variable!r}, which is not set")
    return {"Authorization": f"Bearer {token}"}


def read_answer(answer: Any, job: Job, wall_s: float) -> RunResult:
    """
    Return the result that a service's answer means; `ValueError` for one that says nothing about the program.

    Args:
        answer: the JSON value.
        job: what was asked.
        wall_s: how long the answer took, for a service that does not say how long the program did.
    """
    run = answer.get("run_result") if isinstance(answer, Mapping) else None
    if not isinstance(run, Mapping) or answer.get("status") == "SandboxError":
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        raise ValueError(f"no result: {str(message)[:200]}")
    if run.get("status") not in _STATUSES:
        raise ValueError(f"unknown status {run.get('status')!r}")
    code = run.get("return_code")
    status = _STATUSES[run["status"]]
    if status is Status.OK and code not in (0, None):
        status = Status.ERROR
    output = Output(job.limits.max_output_bytes)
    for stream in ("stdout", "stderr"):
        output.add(stream, str(run.get(stream) or "").encode("utf-8", "replace"))
    return RunResult(
        status=Status.OUTPUT_LIMIT if output.over else status,
        stdout=output.text("stdout"),
        stderr=output.text("stderr"),
        exit_code=code if isinstance(code, int) else None,
        wall_s=float(run.get("execution_time") or wall_s),
        tier=job.tier,
        queued_s=job.sent_at - job.submitted_at,
    )
