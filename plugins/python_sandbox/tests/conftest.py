"""Sandboxes of the tiers that work on this machine, and supervisors of fork servers that a test plays."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from sandbox_settings import SETTINGS, Host, Setting

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Tier, supervisor
from turnwise_python_sandbox.box import landlock, messages
from turnwise_python_sandbox.box.messages import Exited, Launch, Ready, Started
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits

_NEVER_S = 60.0
"""After this long an event that has not happened never will."""


def _read_parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The process name, in parentheses, may contain spaces and digits.
            found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _find_descendants(roots: set[int]) -> set[int]:
    parents = _read_parents()
    found: set[int] = set()
    fresh = set(roots)
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], object]], None]:
    """Waits until a condition holds; fails the test if it never does."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _NEVER_S
        while not condition():
            assert time.monotonic() < deadline, "the condition does not become true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def run_in_child() -> Callable[[Callable[[], object]], object]:
    """Returns the value of a function that runs in a forked child, which it may confine; the value must be JSON."""

    def run(function: Callable[[], object]) -> object:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write_end, json.dumps(function()).encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            value = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(value)

    return run


@pytest.fixture(scope="session")
def our_processes() -> Callable[[], set[int]]:
    """Returns all descendants of this process."""
    return lambda: _find_descendants({os.getpid()})


@pytest.fixture(scope="session")
def programs_of() -> Callable[[Sandbox], set[int]]:
    """Returns the processes of a sandbox's programs: all children of its servers that came after the first call."""
    known: dict[int, set[int]] = {}

    def programs(sandbox: Sandbox) -> set[int]:
        servers = set(sandbox.start()._backend.server_pids)
        found = _find_descendants(servers)
        for server in servers - known.keys():
            known[server] = found
        return found - set().union(*(known[server] for server in servers))

    return programs


@pytest.fixture
def make_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """Starts sandboxes and closes them at the end; skips the test if the tier does not work here."""
    made: list[Sandbox] = []

    def make(tier: int, **changes: object) -> Sandbox:
        try:
            made.append(Sandbox(tier=tier, **changes).start())
        except SandboxUnavailableError as error:
            pytest.skip(f"tier {tier} does not work here: {error}")
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


# The kernel's own Landlock with every test; the older ones with the slow tests.
_PARAMS = [pytest.param(each, id=str(each), marks=[pytest.mark.slow] if each.abi else []) for each in SETTINGS]


@pytest.fixture(scope="module", params=_PARAMS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A sandbox in one setting, with its victim."""
    setting: Setting = request.param
    if setting.user == "root" and os.geteuid() != 0:
        pytest.skip("only root can start a sandbox as root")
    if landlock.detect_abi() < (setting.abi or 1):
        pytest.skip(f"this kernel has Landlock ABI {landlock.detect_abi()}")
    try:
        made = Host(setting)
    except SandboxUnavailableError as error:
        pytest.skip(f"{setting} does not work here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="session", params=[1, 2], ids=["tier1", "tier2"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One small sandbox per tier, shared by all tests that only run programs."""
    limits = {"timeout_s": _NEVER_S, "memory_mb": 256, "disk_mb": 16, "max_files": 200}
    try:
        box = Sandbox(tier=request.param, servers=1, max_in_flight=2, **limits).start()
    except SandboxUnavailableError as error:
        pytest.skip(f"tier {request.param} does not work here: {error}")
    box.run("pass")
    yield box
    box.close()


class FakeServer:
    """A fork server that a test plays: the process that the supervisor stops, and the far end of its socket."""

    def __init__(self, pid: int) -> None:
        self.control, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(_NEVER_S)
        self.process = SimpleNamespace(pid=pid)
        self.errors = ""
        self.stopped = threading.Event()
        self.files: dict[int, list[int]] = {}

    def read_errors(self) -> str:
        """Return the standard error that the test has set."""
        return self.errors

    def stop(self) -> None:
        """Record that the supervisor stopped this server."""
        self.control.close()
        self.stopped.set()

    def send(self, message: messages.Message) -> None:
        """Send a message to the supervisor."""
        self.socket.send(messages.encode(message))

    def receive(self) -> messages.Message:
        """Wait for a message of the supervisor, and keep its files."""
        data, fds, _flags, _address = socket.recv_fds(self.socket, messages.MAX_DATAGRAM_BYTES, 4)
        message = messages.decode(data)
        if isinstance(message, Launch):
            self.files[message.job_id] = fds
        return message

    def start_program(self) -> Launch:
        """Wait for a launch, and report that its program has started."""
        launch = self.receive()
        assert isinstance(launch, Launch)
        self.send(Started(launch.job_id, 0))
        return launch

    def print(self, launch: Launch, data: bytes, stream: int = 1) -> None:
        """Write to the standard output of a program, or to its standard error (2)."""
        os.write(self.files[launch.job_id][1 + stream], data)

    def end_program(self, launch: Launch, wait_status: int = 0, **changes: object) -> None:
        """Close the files of a program, and report its exit."""
        for fd in self.files.pop(launch.job_id):
            os.close(fd)
        self.send(Exited(launch.job_id, wait_status, "", False, 1.5, 0.5, 2048, "")._replace(**changes))

    def run_program(self, wait_status: int = 0) -> Launch:
        """Wait for a launch, and report that its program has started and exited."""
        launch = self.start_program()
        self.end_program(launch, wait_status)
        return launch

    def die(self) -> None:
        """Close everything, as the kernel does for a dead process. Idempotent."""
        for fds in self.files.values():
            for fd in fds:
                os.close(fd)
        self.files.clear()
        self.socket.close()


class Pool:
    """A supervisor of fake servers."""

    limits = Limits(timeout_s=_NEVER_S, memory_mb=64, max_output_bytes=1000, cpu_s=60, disk_mb=8, max_files=9)

    def __init__(self, num_servers: int, capacity: int, max_sessions: int) -> None:
        self.servers: list[FakeServer] = []
        self._new_servers: queue.Queue[FakeServer] = queue.Queue()
        spec = SimpleNamespace(tier=Tier.LANDLOCK, start=self._start_server)
        self.supervisor = supervisor.Supervisor(spec, num_servers, capacity, max_sessions)

    def _start_server(self) -> FakeServer:
        server = FakeServer(len(self.servers) + 1)
        self.servers.append(server)
        self._new_servers.put(server)
        return server

    def next_server(self, *, ready: bool = True) -> FakeServer:
        """Wait until the supervisor starts a further server, and make it ready."""
        server = self._new_servers.get(timeout=_NEVER_S)
        if ready:
            server.send(Ready(7, ()))
        return server

    def submit(self, code: bytes = b"code", session_fds: tuple[int, int, int] | None = None, **limits: object) -> Job:
        """Submit a job and return it."""
        changed = evolve(self.limits, **limits)
        job = Job(code=code, stdin=b"input", limits=changed, tier=Tier.LANDLOCK, session_fds=session_fds)
        self.supervisor.submit(job)
        return job

    def submit_session(self, idle_s: float = _NEVER_S) -> Job:
        """Submit the job of a session, with files that no interpreter reads."""
        fds = tuple(os.open(os.devnull, os.O_RDWR) for _ in range(3))
        job = self.submit(session_fds=fds, timeout_s=idle_s)
        job.future.add_done_callback(lambda _: [os.close(fd) for fd in fds])
        return job

    def close(self) -> None:
        """Close the supervisor and the fake servers."""
        self.supervisor.close()
        for server in self.servers:
            server.die()


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    """Makes supervisors of fake servers, which retry a failed start at once, and closes them at the end."""
    monkeypatch.setattr(supervisor, "start_server", lambda spec: spec.start())
    monkeypatch.setattr(supervisor, "_FIRST_RETRY_S", 0.0)
    made: list[Pool] = []

    def make(num_servers: int = 1, capacity: int = 8, max_sessions: int = 8) -> Pool:
        made.append(Pool(num_servers, capacity, max_sessions))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
