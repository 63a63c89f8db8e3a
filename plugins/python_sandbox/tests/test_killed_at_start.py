"""A process that is killed while its sandbox starts or runs leaves no process and no file behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from turnwise_python_sandbox import Tier
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.selftest import build_server_spec, run_selftest

_IN_THE_SELF_TEST = """
import os, signal, sys
from turnwise_python_sandbox import selftest
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.result import Tier

def be_killed(supervisor, directory):
    assert os.listdir(os.environ["TMPDIR"]) != []
    kill()

selftest._run_probe = be_killed
selftest.run_selftest(selftest.build_server_spec(SandboxConfig(), Tier(int(sys.argv[1]))))
"""
_BEFORE_THE_SERVER_IS_READY = """
import os, signal, sys
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.result import Tier
from turnwise_python_sandbox.selftest import build_server_spec
from turnwise_python_sandbox.server_process import start_server

server = start_server(build_server_spec(SandboxConfig(), Tier(int(sys.argv[1]))))
assert bool(os.listdir(os.environ["TMPDIR"])) == (server.directory is not None)
print(server.process.pid, flush=True)
kill()
"""
_WHILE_A_SESSION_HAS_FILES = """
import sys
from turnwise_python_sandbox import Sandbox

box = Sandbox(tier=int(sys.argv[1]), servers=1).start()
session = box.session()
assert session.run("open('file', 'w').write('x')").status == "ok"
print(*box._get_backend().server_pids, flush=True)
kill()
"""
SCRIPTS = {
    "self-test": _IN_THE_SELF_TEST,
    "server start": _BEFORE_THE_SERVER_IS_READY,
    "session": _WHILE_A_SESSION_HAS_FILES,
}
_KILL = {
    "itself": """
import os, signal

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
""",
    # As Ray does at the end of an actor that the driver kills.
    "its children and itself": """
import os, psutil, signal

def kill():
    children = psutil.Process().children()
    for child in children:
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
""",
}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files with the mode of /tmp: servers that root starts have another user."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail when it does not come true."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("tier", [Tier.NAMESPACES, Tier.LANDLOCK])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("kill", _KILL.values(), ids=_KILL)
def test_nothing_is_left(temporary: Path, tier: Tier, script: str, kill: str) -> None:
    """The self-test's files, and the directories of servers, disappear."""
    if failure := run_selftest(build_server_spec(SandboxConfig(), tier)).failure:
        pytest.skip(f"this tier does not work here: {failure}")

    killed = subprocess.run(
        [sys.executable, "-c", kill + script, str(int(tier))],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: not list(temporary.iterdir()))
    wait_until(lambda: not any(map(is_alive, map(int, killed.stdout.split()))))
