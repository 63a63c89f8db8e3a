"""
One new process per run: tier 3 (macOS, `sandbox-exec`) and `unsafe_subprocess`, which isolates nothing.

Neither is for training: a process group is killed at the end, and what left the group stays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from turnwise_python_sandbox.box.messages import Ended
from turnwise_python_sandbox.box.workspace import remove_tree
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import BOOTSTRAP, PACKAGE, find_interpreter
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier

_SEATBELT: Final = """
(version 1)
(deny default)
(allow process-exec* sysctl-read mach-lookup file-read-metadata)
(allow file-read* (subpath "/usr/lib") (subpath "/System") (subpath "/Library") (literal "/dev/urandom") {readable})
(allow file-write* (literal "/dev/null") (subpath (param "PLACE")))
(allow file-read* (subpath (param "PLACE")))
"""


class ColdRuns:
    """
    Runs each job in a process of its own.

    Args:
        config: limits and interpreter.
        tier: `SEATBELT` or `UNSAFE_SUBPROCESS`.

    Raises:
        SandboxUnavailableError: there is no `sandbox-exec`.
    """

    def __init__(self, config: SandboxConfig, tier: Tier) -> None:
        self._interpreter = find_interpreter(config.python)
        self._config = config
        self._prefix = self._seatbelt() if tier is Tier.SEATBELT else []
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(config.capacity, thread_name_prefix="turnwise-sandbox")
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._closed = False

    def number(self) -> int:
        """Return a new job's number."""
        return next(self._numbers)

    def submit(self, job: Job) -> None:
        """Run it on a thread."""
        self._threads.submit(self._run, job)

    def kill(self, job: Job) -> None:
        """End it early."""
        process = self._running.get(job.number)
        if process is not None:
            _kill_group(process)

    def close(self) -> None:
        """End all."""
        self._closed = True
        for process in list(self._running.values()):
            _kill_group(process)
        self._threads.shutdown(wait=True)

    def forget(self) -> None:
        """Nothing is shared with a child."""

    def _run(self, job: Job) -> None:
        directory = tempfile.mkdtemp(prefix="turnwise-sandbox-")
        try:
            if self._closed or job.answer.cancelled():
                job.fail("the sandbox was closed")
                return
            job.finish(self._attend(job, directory))
        except Exception as error:  # noqa: BLE001 - every caller must be answered
            job.fail(f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(job.number, None)
            remove_tree(directory)

    def _attend(self, job: Job, directory: str) -> Ended:
        process = self._spawn(job, directory)
        self._running[job.number] = process
        cause = _read_until_end(job, process)
        _kill_group(process)
        _, wait_status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(wait_status)
        cpu_s, wall_s = used.ru_utime + used.ru_stime, time.monotonic() - job.began_at
        return Ended(job.number, wait_status, cause, False, wall_s, cpu_s, used.ru_maxrss, "")

    def _spawn(self, job: Job, directory: str) -> subprocess.Popen[bytes]:
        files = job.open_files()
        code, stdin, stdout, stderr = files
        limits = f"[{code}, {job.limits.cpu_s}, {job.limits.memory_mb}, {job.limits.disk_mb}]"
        try:
            job.sent_at = job.began_at = time.monotonic()
            return subprocess.Popen(
                [
                    *(part.replace("(PLACE)", directory) for part in self._prefix),
                    *(self._interpreter.executable, "-S", "-s", "-P", "-X", "utf8", "-c", BOOTSTRAP),
                    *(
                        PACKAGE,
                        "cold",
                        f'{{"limits": {limits}, "path": {list(self._interpreter.packages)!r}}}'.replace("'", '"'),
                    ),
                ],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(code,),
                cwd=directory,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory},
                start_new_session=True,
            )
        finally:
            for fd in files:
                os.close(fd)

    def _seatbelt(self) -> list[str]:
        program = shutil.which("sandbox-exec")
        if program is None:
            raise SandboxUnavailableError("tier 3 (seatbelt): there is no sandbox-exec")
        paths = (*self._interpreter.readable(self._config.readable), self._interpreter.home, PACKAGE)
        profile = _SEATBELT.format(readable=" ".join(f'(subpath "{path}")' for path in paths))
        return [program, "-D", "PLACE=(PLACE)", "-p", profile]


def _read_until_end(job: Job, process: subprocess.Popen[bytes]) -> str:
    """Keep what it prints until it ends, is too loud or is late; return the cause as `Ended` has it."""
    deadline = job.began_at + job.limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for fd in job.pipes:
            selector.register(fd, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            for key, _ in selector.select(min(0.05, deadline - time.monotonic())):
                if not job.read(key.fd):
                    selector.unregister(key.fd)
            if job.output.over:
                return "asked"
            # Not reaped here: the caller wants what it used.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return ""
    return "wall"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
