"""No process of a run on Ray leaves processes, shared memory or temporary files behind, whichever part is killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from leaking_blueprint import LeakingBlueprint
from ray_runs import FINISHED, ON_RAY, check_complete, make_manager, make_tasks, pids, wait_until
from shared_segments import segments_of

pytestmark = [*ON_RAY, pytest.mark.slow]

COMMANDS = {"sandbox server": "turnwise_python_sandbox", "tool": "process_server", "verifier": "verifier_process"}
"""A part of the command line of the processes that actors start."""
ACTORS = ("worker", "replica", "judge", "reward worker")


@pytest.fixture
def temporary():
    """A directory for temporary files with the mode of /tmp: servers that root starts have another user."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def is_alive(process):
    """Return whether a process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def family_of(pid):
    """Return a process and all its descendants, with their command lines."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                found[process] = " ".join(process.cmdline())
    return found


def actor_pids(runtime):
    """Return the process id of one actor of each kind."""
    groups = (runtime.workers, runtime.policy, runtime.pools["judge"], runtime.rewards)
    return {name: pids(group.slots)[0] for name, group in zip(ACTORS, groups, strict=True)}


def test_killed_parts_leave_nothing(ray_cluster, temporary):
    """
    Worker, replica, the judge's replica, reward worker, sandbox server, tool process and verifier are killed in turn,
    with SIGKILL: every run is complete, the processes that the victim had started end, and nothing is left at the end.
    """
    seen = {}
    parts = {"workers": 1, "replicas": 1, "judges": 1, "reward_workers": 1}
    with make_manager(LeakingBlueprint(temporary=str(temporary)), **parts) as manager:
        check_complete(manager.rollout(make_tasks(4)), make_tasks(4))
        for victim in (*ACTORS, *COMMANDS):
            actors = actor_pids(manager.runtime)
            family = {process: line for pid in actors.values() for process, line in family_of(pid).items()}
            seen |= family
            killed = [psutil.Process(actors[victim])] if victim in ACTORS else []
            killed = killed or [process for process, line in family.items() if COMMANDS[victim] in line]
            assert killed, f"there is no {victim}: {family}"
            orphans = [process for each in killed for process in family_of(each.pid)]
            for process in killed:
                with suppress(psutil.NoSuchProcess):  # bubblewrap ends with the server inside
                    process.kill()

            results = manager.rollout(make_tasks(4, victim))

            check_complete(results, make_tasks(4, victim))
            assert {result.status for result in results} <= FINISHED, [result.fault for result in results]
            wait_until(lambda gone=orphans: not any(map(is_alive, gone)), f"alive without their {victim}: {orphans}")
        seen |= {
            process: line for pid in actor_pids(manager.runtime).values() for process, line in family_of(pid).items()
        }

    wait_until(lambda: not any(map(is_alive, seen)), "alive after the run")
    wait_until(lambda: not list(temporary.iterdir()), lambda: f"files are left: {list(temporary.rglob('*'))}")
    assert segments_of([os.getpid(), *(each.pid for each in seen)]) == []


DRIVER = """
import os, sys
from leaking_blueprint import LeakingBlueprint
from ray_runs import make_manager, make_tasks

parts = {"workers": 1, "replicas": 1, "judges": 1, "reward_workers": 1}
with make_manager(LeakingBlueprint(temporary=os.environ["TMPDIR"]), **parts) as manager:
    manager.rollout(make_tasks(4))
    print("running", flush=True)
    sys.stdin.read()
"""


def test_a_killed_driver_leaves_nothing(temporary):
    """It is killed with SIGKILL while everything runs, with a Ray that it has started itself."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path, "RAY_TMPDIR": tempfile.gettempdir()},
        text=True,
    )
    with driver:
        for line in driver.stdout:
            if line.strip() == "running":
                break
        family = family_of(driver.pid)
        assert all(any(part in line for line in family.values()) for part in COMMANDS.values()), family
        driver.send_signal(signal.SIGKILL)

    # Ray's own agents outlive the driver for a minute; they are no part of turnwise.
    actors = re.compile(r"ray::(?!DashboardAgent|RuntimeEnvAgent)")
    ours = [each for each, line in family.items() if "turnwise" in line or actors.search(line)]
    wait_until(lambda: not any(map(is_alive, ours)), "alive without their driver")
    wait_until(lambda: not [each for each in temporary.iterdir() if each.name.startswith("turnwise")], "files are left")
    assert segments_of(each.pid for each in family) == []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
