"""
Runs each job in a new process: tier 3 (macOS, `sandbox-exec`) and `unsafe_subprocess`, which does not isolate.

Neither is for training: this kills the process group of a program, and a process that left the group survives.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from turnwise_python_sandbox.box.messages import Exited
from turnwise_python_sandbox.box.tree_removal import remove_tree
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import BOOTSTRAP, PACKAGE, find_interpreter
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.left_files import create_directory, remove_directory
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier

_POLL_S: Final = 0.05
_SEATBELT_PROFILE: Final = """
(version 1)
(deny default)
(allow process-exec* sysctl-read mach-lookup file-read-metadata)
(allow file-read* (subpath "/usr/lib") (subpath "/System") (subpath "/Library") (literal "/dev/urandom") {readable})
(allow file-write* (literal "/dev/null") (subpath (param "PLACE")))
(allow file-read* (subpath (param "PLACE")))
"""


class SubprocessBackend:
    """
    Runs each job in a new process.

    Args:
        config: limits and interpreter.
        tier: `SEATBELT` or `UNSAFE_SUBPROCESS`.

    Raises:
        SandboxUnavailableError: `sandbox-exec` is missing.
    """

    def __init__(self, config: SandboxConfig, tier: Tier) -> None:
        self.tier = tier
        self._interpreter = find_interpreter(config.python)
        self._config = config
        self._prefix = self._build_seatbelt_prefix() if tier is Tier.SEATBELT else []
        self._threads = ThreadPoolExecutor(config.capacity, thread_name_prefix="turnwise-sandbox")
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._closed = False
        self._directory = create_directory("turnwise-sandbox-")

    def submit(self, job: Job) -> None:
        self._threads.submit(self._run, job)

    def kill(self, job: Job) -> None:
        process = self._running.get(job.id)
        if process is not None:
            _kill_group(process)

    def close(self) -> None:
        self._closed = True
        for process in list(self._running.values()):
            _kill_group(process)
        self._threads.shutdown(wait=True)
        remove_directory(self._directory)

    def detach_after_fork(self) -> None:
        """Do nothing: a child shares nothing with its parent."""

    def _run(self, job: Job) -> None:
        directory = tempfile.mkdtemp(dir=self._directory)
        try:
            if self._closed or job.future.cancelled():
                job.fail("the sandbox was closed")
                return
            job.complete(self._run_process(job, directory))
        except Exception as error:  # noqa: BLE001 - every job must be resolved
            job.fail(f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(job.id, None)
            remove_tree(directory)

    def _run_process(self, job: Job, directory: str) -> Exited:
        process = self._start_process(job, directory)
        self._running[job.id] = process
        cause = _read_until_exit(job, process)
        _kill_group(process)
        _, wait_status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(wait_status)
        cpu_s, wall_s = used.ru_utime + used.ru_stime, time.monotonic() - job.started_at
        return Exited(job.id, wait_status, cause, False, wall_s, cpu_s, used.ru_maxrss, "")

    def _start_process(self, job: Job, directory: str) -> subprocess.Popen[bytes]:
        files = job.open_files()
        code, stdin, stdout, stderr = files
        limits = (code, job.limits.cpu_s, job.limits.memory_mb, job.limits.disk_mb)
        settings = json.dumps({"limits": limits, "import_path": self._interpreter.packages})
        try:
            job.sent_at = job.started_at = time.monotonic()
            return subprocess.Popen(
                [
                    *(part.replace("(PLACE)", directory) for part in self._prefix),
                    *(self._interpreter.executable, "-S", "-s", "-P", "-X", "utf8"),
                    *("-c", BOOTSTRAP, PACKAGE, "run_once", settings),
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

    def _build_seatbelt_prefix(self) -> list[str]:
        program = shutil.which("sandbox-exec")
        if program is None:
            raise SandboxUnavailableError("tier 3 (seatbelt): sandbox-exec is missing")
        readable = self._interpreter.list_readable_paths(self._config.readable)
        paths = (*readable, self._interpreter.home, PACKAGE)
        profile = _SEATBELT_PROFILE.format(readable=" ".join(f'(subpath "{path}")' for path in paths))
        return [program, "-D", "PLACE=(PLACE)", "-p", profile]


def _read_until_exit(job: Job, process: subprocess.Popen[bytes]) -> str:
    """Collect output until the process exits or must be killed; return the cause as in `Exited`."""
    deadline = job.started_at + job.limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for fd in job.pipes:
            selector.register(fd, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            for key, _ in selector.select(min(_POLL_S, deadline - time.monotonic())):
                if not job.pipes.read(key.fd, job.output):
                    selector.unregister(key.fd)
            if job.output.truncated:
                return "asked"
            # WNOWAIT: the caller reaps the process, for its resource usage.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return ""
    return "wall"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
