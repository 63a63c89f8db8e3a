"""Finds the tiers that work here by trying to break out of each, not by reading versions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import find_interpreter
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.left_files import create_directory, remove_directory
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.result import RunResult, SandboxUnavailableError, Status, Tier, format_tier
from turnwise_python_sandbox.server_command import ServerSpec, find_unprivileged_uid
from turnwise_python_sandbox.supervisor import Supervisor

_TIMEOUT_S: Final = 20.0
_LIMITS: Final = Limits(
    timeout_s=_TIMEOUT_S, memory_mb=256, max_output_bytes=65536, cpu_s=int(_TIMEOUT_S), disk_mb=8, max_files=64
)
_PROBE: Final = """
import ctypes, json, os, socket, sys, threading, tempfile

canary, supervisor = {canary!r}, {supervisor!r}
breaches, broken = [], []

def must_fail(name, action):
    try:
        action()
    except OSError:
        return
    breaches.append(name)

def must_work(name, action):
    try:
        if action() is False:
            broken.append(name)
    except Exception as error:
        broken.append(f"{{name}}: {{error}}")

must_fail("read a file of the host", lambda: open(canary).read())
must_fail("write a file of the host", lambda: open(canary + ".new", "w"))
must_fail("list the host's root directory", lambda: os.listdir("/"))
must_fail("read /proc", lambda: os.listdir("/proc"))
must_fail("read its own process's environment", lambda: open("/proc/self/environ").read())
must_fail("start a process", lambda: os._exit(0) if os.fork() == 0 else None)
must_fail("run a program", lambda: os.execv("/bin/true", ["true"]))
must_fail("signal the supervisor", lambda: os.kill(supervisor, 0))
must_fail("open a TCP socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
must_fail("open a UDP socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
must_fail("open a Unix socket", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
must_fail("create memory outside its address space", lambda: os.memfd_create("x"))
if os.geteuid() == 0:
    breaches.append("be root")

def files():
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
    os.mkdir("made")
    os.rmdir("made")

def threads():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(1))
    thread.start()
    thread.join()
    return seen == [1]

must_work("write its own files", files)
must_work("start a thread", threads)
must_work("import from the standard library", lambda: __import__("wave"))
must_work("use a socket pair", lambda: [each.close() for each in socket.socketpair()])
print(json.dumps([breaches, broken]))
"""


@frozen(kw_only=True)
class SelfTestResult:
    """
    Result of the self-test of one tier.

    Attributes:
        tier: the tier.
        failure: why it cannot be used; empty if it passed.
        landlock_abi: the kernel's Landlock ABI, as the fork server saw it.
    """

    tier: Tier
    failure: str = ""
    landlock_abi: int = 0


@frozen(kw_only=True)
class TierSelection:
    """The selected tier as a `ServerSpec`, and the results of all self-tests up to it."""

    spec: ServerSpec
    results: tuple[SelfTestResult, ...]


def select_tier(config: SandboxConfig) -> TierSelection:
    """
    Test the tiers of fork servers, best first, and return the first that passes.

    Raises:
        SandboxUnavailableError: none passes; the text has the reason for each.
    """
    results: list[SelfTestResult] = []
    candidates = [Tier.NAMESPACES, Tier.LANDLOCK] if config.tier is None else [config.tier]
    for tier in candidates:
        spec = build_server_spec(config, tier)
        results.append(run_selftest(spec))
        if not results[-1].failure:
            return TierSelection(spec=spec, results=tuple(results))
    raise SandboxUnavailableError("; ".join(f"{format_tier(result.tier)}: {result.failure}" for result in results))


def build_server_spec(config: SandboxConfig, tier: Tier) -> ServerSpec:
    """Return how to start a server of a tier with this config."""
    return ServerSpec(
        tier=tier, interpreter=find_interpreter(config.python), config=config, uid=find_unprivileged_uid()
    )


def run_selftest(spec: ServerSpec) -> SelfTestResult:
    """Start one server without preloaded modules, and try to break out of it."""
    if sys.platform != "linux":
        return SelfTestResult(tier=spec.tier, failure="it needs Linux")
    bare = evolve(spec, config=evolve(spec.config, preload=()))
    supervisor = Supervisor(bare, 1, 1, 1)
    try:
        with _open_directory() as directory:
            result = _run_probe(supervisor, directory)
        ready = supervisor.last_ready
        abi = ready.landlock_abi if ready else 0
        return SelfTestResult(tier=spec.tier, failure=_explain_failure(result), landlock_abi=abi)
    finally:
        supervisor.close()


@contextmanager
def _open_directory() -> Iterator[str]:
    """Create a directory that every user may use; it is removed at the end, also if this process is killed."""
    directory = create_directory("turnwise-canary-")
    try:
        os.chmod(directory, 0o777)
        yield directory
    finally:
        remove_directory(directory)


def _run_probe(supervisor: Supervisor, directory: str) -> RunResult:
    # Every user may read and write this file, so that only the sandbox can keep the probe from it.
    canary = Path(directory, "canary")
    canary.write_text("the sandbox leaks")
    canary.chmod(0o666)
    code = _PROBE.format(canary=str(canary), supervisor=os.getpid())
    job = Job(code=code.encode(), stdin=b"", limits=_LIMITS, tier=supervisor.tier)
    supervisor.submit(job)
    return job.future.result()


def _explain_failure(result: RunResult) -> str:
    """Return why a tier with this result of the probe cannot be used; empty if it can."""
    if result.status is not Status.OK:
        last_line = result.stderr.strip().splitlines()[-1:] or ["it printed no error"]
        return f"the probe ended with {result.status.value}: {last_line[0]}"
    breaches, broken = json.loads(result.stdout)
    if breaches:
        return f"a program could {', '.join(breaches)}"
    return f"a program could not {', '.join(broken)}" if broken else ""
