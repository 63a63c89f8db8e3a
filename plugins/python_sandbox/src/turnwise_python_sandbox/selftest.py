"""Which tier works here: found by trying what each must refuse, not by reading versions."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import find_interpreter
from turnwise_python_sandbox.job import Job, Limits
from turnwise_python_sandbox.launching import Recipe, unprivileged_uid
from turnwise_python_sandbox.result import RunResult, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.supervisor import Supervisor

_PROBE_S: Final = 20.0
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
must_fail("make memory that is no address space", lambda: os.memfd_create("x"))
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

must_work("write files of its own", files)
must_work("start a thread", threads)
must_work("import from the standard library", lambda: __import__("wave"))
must_work("use a pair of sockets", lambda: [each.close() for each in socket.socketpair()])
print(json.dumps([breaches, broken]))
"""


@frozen(kw_only=True)
class Trial:
    """
    How one tier fared.

    Attributes:
        tier: which.
        reason: why it cannot be used; empty when it can.
        landlock_abi: of the kernel, as its server found it.
    """

    tier: Tier
    reason: str = ""
    landlock_abi: int = 0


@frozen(kw_only=True)
class Choice:
    """The tier that is used, the recipe of its servers, and every trial that led there."""

    recipe: Recipe
    trials: tuple[Trial, ...]


def choose(config: SandboxConfig) -> Choice:
    """
    Try the tiers of fork servers, best first, and return the first that passes its self-test.

    Raises:
        SandboxUnavailableError: none does; the text has the reason of each.
    """
    trials: list[Trial] = []
    wanted = [Tier.NAMESPACES, Tier.LANDLOCK] if config.tier is None else [config.tier]
    for tier in wanted:
        recipe = make_recipe(config, tier)
        trials.append(try_tier(recipe))
        if not trials[-1].reason:
            return Choice(recipe=recipe, trials=tuple(trials))
    raise SandboxUnavailableError("; ".join(f"tier {int(t.tier)} ({t.tier.name.lower()}): {t.reason}" for t in trials))


def make_recipe(config: SandboxConfig, tier: Tier) -> Recipe:
    """Return how servers of a tier are started for this config."""
    return Recipe(tier=tier, interpreter=find_interpreter(config.python), config=config, uid=unprivileged_uid())


def try_tier(recipe: Recipe) -> Trial:
    """Start one bare server of a tier and try to break out of it."""
    if sys.platform != "linux":
        return Trial(tier=recipe.tier, reason="it needs Linux")
    bare = evolve(recipe, config=evolve(recipe.config, preload=()))
    supervisor = Supervisor(bare, 1, 1, 1)
    try:
        with tempfile.TemporaryDirectory(prefix="turnwise-canary-") as directory:
            result = _probe(supervisor, recipe.tier, directory)
        ready = supervisor.last_ready
        return Trial(tier=recipe.tier, reason=_reason(result), landlock_abi=ready.landlock_abi if ready else 0)
    finally:
        supervisor.close()


def _probe(supervisor: Supervisor, tier: Tier, directory: str) -> RunResult:
    # Open to everyone: only the sandbox stands between the program and this file.
    os.chmod(directory, 0o777)
    canary = Path(directory, "canary")
    canary.write_text("the sandbox leaks")
    canary.chmod(0o666)
    code = _PROBE.format(canary=str(canary), supervisor=os.getpid())
    limits = Limits(
        timeout_s=_PROBE_S, memory_mb=256, max_output_bytes=65536, cpu_s=int(_PROBE_S), disk_mb=8, max_files=64
    )
    job = Job(number=supervisor.number(), code=code.encode(), stdin=b"", limits=limits, tier=tier)
    supervisor.submit(job)
    return job.answer.result()


def _reason(result: RunResult) -> str:
    if result.status is not Status.OK:
        last = result.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        return f"the probe ended with {result.status.value}: {last[0]}"
    breaches, broken = json.loads(result.stdout)
    if breaches:
        return f"a program could {', '.join(breaches)}"
    return f"a program could not {', '.join(broken)}" if broken else ""
