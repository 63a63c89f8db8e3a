"""The end of a Ray that a run has started; no Ray is started."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from turnwise.interrupts import ENDS_WITHOUT_HANDLERS
from turnwise.runtime.ray import own_ray
from turnwise.runtime.ray.own_ray import OwnRay, end_ray

ray = pytest.importorskip("ray")
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def usual_end() -> Iterator[None]:
    """The process of the tests ends with its handlers."""
    ENDS_WITHOUT_HANDLERS.clear()
    yield
    ENDS_WITHOUT_HANDLERS.clear()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Ray's end waits for this event."""
    released = threading.Event()
    monkeypatch.setattr(ray, "shutdown", lambda **_options: released.wait())
    yield released
    released.set()


def start(monkeypatch: pytest.MonkeyPatch) -> tuple[OwnRay, subprocess.Popen[bytes]]:
    """Start a Ray that is one process in a separate session."""
    started: list[subprocess.Popen[bytes]] = []

    def init(**_options: object) -> None:
        started.append(subprocess.Popen(SLEEP, start_new_session=True))

    monkeypatch.setattr(ray, "init", init)
    own = OwnRay()
    own.start()
    return own, started[0]


def test_a_ray_that_does_not_end_is_killed(hanging: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns although Ray hangs; its processes are killed by id, and one line says so."""
    own, process = start(monkeypatch)
    bystander = subprocess.Popen(SLEEP)
    with capture_logs() as lines:
        end_ray(own, seconds=0.01)

    assert -9 == process.wait(timeout=60)
    assert [("warning", [process.pid])] == [(line["log_level"], line["killed_processes"]) for line in lines]
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_an_exit_while_ray_ends_runs_no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt may end the process at any time; Ray's C++ code would crash in the exit handlers."""
    seen = []
    monkeypatch.setattr(ray, "shutdown", lambda **_options: seen.append(ENDS_WITHOUT_HANDLERS.is_set()))
    end_ray(None)
    assert [True] == seen
    assert not ENDS_WITHOUT_HANDLERS.is_set()


def test_a_process_that_an_ended_ray_has_left_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's agents run on for some seconds; without a word they do not."""
    monkeypatch.setattr(ray, "shutdown", lambda **_options: None)
    own, process = start(monkeypatch)
    with capture_logs() as lines:
        end_ray(own)

    assert -9 == process.wait(timeout=60)
    assert [] == lines


def test_the_environment_of_a_process_that_starts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was still empty for one process in seven when the call that started it had returned."""
    environment = tmp_path / "environ"
    environment.touch()
    (tmp_path / "exe").symlink_to(sys.executable)
    monkeypatch.setattr(own_ray.time, "sleep", lambda _seconds: environment.write_bytes(b"A=1"))

    assert b"A=1" == own_ray._environment_of(tmp_path)


def test_processes_of_a_cluster_of_others_stay(hanging: threading.Event) -> None:
    """A run that has joined a cluster stops waiting for it, and kills nothing."""
    with capture_logs() as lines:
        end_ray(None, seconds=0.01)
    assert [[]] == [line["killed_processes"] for line in lines]
    assert ENDS_WITHOUT_HANDLERS.is_set()


def test_ray_ends_no_second_time_at_the_exit(hanging: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler would wait for what the run has waited for; after an orderly end Ray may be used again."""
    handlers = {ray.shutdown}
    monkeypatch.setattr(atexit, "unregister", handlers.discard)
    monkeypatch.setattr(atexit, "register", lambda function, **_options: handlers.add(function))
    end_ray(None, seconds=0.01)
    assert set() == handlers
    hanging.set()
    end_ray(None)
    assert {ray.shutdown} == handlers


@pytest.mark.parametrize("keep_files", [False, True])
def test_the_files_of_a_session_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_files: bool) -> None:
    """Logs stay where an actor was lost, with a line that names the folder."""
    monkeypatch.setattr(ray, "shutdown", lambda **_options: None)
    session, latest = tmp_path / "session_1", tmp_path / "session_latest"
    (session / "logs").mkdir(parents=True)
    os.symlink(session, latest)
    with capture_logs() as lines:
        end_ray(OwnRay(session), keep_files=keep_files)

    assert keep_files == session.exists() == latest.is_symlink()
    assert ([str(session)] if keep_files else []) == [line["folder"] for line in lines]


@pytest.mark.parametrize("dead", [False, True])
def test_a_ray_that_has_lost_a_part_leaves_no_handlers(monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    """The command line then ends at once: Ray's code in C++ would wait for the part, and set the exit code."""
    monkeypatch.setattr(ray, "shutdown", lambda **_options: None)
    with subprocess.Popen(SLEEP) as process:
        parts = {"gcs_server": [SimpleNamespace(process=process)]}
        node = SimpleNamespace(get_session_dir_path=lambda: str(Path("nowhere")), all_processes=parts)
        monkeypatch.setattr(ray, "init", lambda **_options: None)
        monkeypatch.setattr(ray._private.worker, "_global_node", node)
        own = OwnRay()
        own.start()
        if dead:
            process.kill()
            process.wait()
        end_ray(own)
        process.kill()
    assert dead == ENDS_WITHOUT_HANDLERS.is_set()


CLOSES = """
import threading
import ray
from turnwise.runtime.loop_thread import LoopThread
from turnwise.runtime.ray.cluster import Cluster
from turnwise.runtime.ray.own_ray import end_ray

def hang(**_options):
    print("ending", flush=True)
    threading.Event().wait()

ray.shutdown = hang
end_ray.__kwdefaults__["seconds"] = 1e6
cluster = Cluster()
cluster._connected, Cluster._opened, Cluster._num_runs = True, True, 1
thread = LoopThread()
try:
    thread.call(cluster.close())
finally:
    thread.close()
"""


def test_an_interrupt_ends_a_process_whose_ray_hangs() -> None:
    """No thread and no exit handler keeps the process, however long Ray takes."""
    command = [sys.executable, "-c", CLOSES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=600)
    assert b"KeyboardInterrupt" in err
    assert process.returncode in (1, -signal.SIGINT)


def test_ray_starts_without_its_usual_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The two of every start are dropped, and no others; agents of Ray are told to end soon after a killed driver."""

    def init(**_options: object) -> None:
        logger = logging.getLogger("ray._private.worker")
        logger.warning("SIGTERM handler is not set because current thread is not the main thread.")
        logging.getLogger(own_ray._TOKEN_LOGGER).warning("Token authentication is enabled for this Ray cluster. Set")
        logger.warning("the disk is full")
        assert "1" == os.environ["RAY_RUNTIME_ENV_AGENT_CHECK_PARENT_INTERVAL_S"]

    monkeypatch.delenv("RAY_RUNTIME_ENV_AGENT_CHECK_PARENT_INTERVAL_S", raising=False)
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    monkeypatch.setattr(ray, "init", init)
    OwnRay().start()
    assert {"the disk is full"} == {record.getMessage() for record in caplog.records}


def test_a_part_without_which_no_actor_runs() -> None:
    """The raylet and the GCS are such parts, and others are not, such as the reader of logs."""
    own = OwnRay()
    parts = {name: subprocess.Popen(SLEEP) for name in ("log_monitor", "gcs_server", "raylet")}
    own._parts = list(parts.items())
    found = []
    for part in parts.values():
        found.append(own.dead_part())
        part.kill()
        part.wait()

    assert [None, None, "gcs_server"] == found
