"""
Machines with addresses of their own, for Ray nodes and agents: network namespaces that a bridge connects.

A system that allows no namespaces gets two addresses of the loopback network instead.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attrs import define, field

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@define(eq=False)
class Machine:
    """
    A machine of a test.

    Attributes:
        host: its address for the others.
        before: words before a command that runs on it.
    """

    host: str
    before: Sequence[str]
    environment: Mapping[str, str]
    _started: list[subprocess.Popen[bytes]] = field(factory=list, init=False)

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        """Start a program."""
        words = [*self.before, *map(str, command)]
        self._started.append(subprocess.Popen(words, env=self.environment, start_new_session=True))
        return self._started[-1]

    def start_ray(self, *arguments: str) -> None:
        """Start a node of Ray, whose first process waits until the machine is killed."""
        node = ("--node-ip-address", self.host, "--num-cpus", "4", "--disable-usage-stats", "--block")
        self.start(*RAY, "start", *arguments, *node)

    def count_nodes(self, address: str) -> int:
        """Return the number of nodes of a cluster, 0 if it cannot be asked yet."""
        code = f"import ray; ray.init('{address}', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        found = subprocess.run(
            [*self.before, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=dict(self.environment),
            check=False,
        )
        return int(found.stdout.split()[-1]) if found.returncode == 0 else 0

    def kill(self) -> None:
        """Kill all of its programs at once, as a machine that loses its power does."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()

    def _pids(self) -> list[int]:
        if self.before:
            name = self.before[-1].rpartition("/")[2]
            return [int(pid) for pid in run("ip", "netns", "pids", name).split()]
        # The children of a node are in its session.
        sessions = {process.pid for process in self._started}
        return [int(each.name) for each in Path("/proc").glob("[0-9]*") if _session_of(int(each.name)) in sessions]


@contextmanager
def two_machines(environment: Mapping[str, str]) -> Iterator[tuple[Machine, Machine]]:
    """Two machines inside the `with` statement, on which nothing runs."""
    with ExitStack() as stack:
        names = [f"tw{os.getpid() % 100_000}{letter}" for letter in "ab"]
        places = [([], "127.0.0.2"), ([], "127.0.0.3")]
        with suppress(OSError, subprocess.CalledProcessError):
            subnet = f"10.211.{os.getpid() % 250}"
            stack.enter_context(bridged(names, subnet))
            # Not `ip netns exec`, which hides the control groups, by which Ray reads the free memory.
            inside = [["nsenter", f"--net=/run/netns/{name}"] for name in names]
            places = [(words, f"{subnet}.{2 + number}") for number, words in enumerate(inside)]
        machines = [Machine(host, before, environment) for before, host in places]
        for machine in machines:
            stack.callback(machine.kill)
        yield machines[0], machines[1]


@contextmanager
def bridged(names: Sequence[str], subnet: str) -> Iterator[None]:
    """Make namespaces and a bridge between them; an error of `run` if this is not allowed."""
    bridge = f"{names[0]}br"
    with ExitStack() as stack:
        run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"{name}v", "master", bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{subnet}.{2 + number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "route", "add", "default", "via", f"{subnet}.1")  # Ray finds its address by it
        yield


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for Ray: the path of a test's own folder is too long for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="tw"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _session_of(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1
