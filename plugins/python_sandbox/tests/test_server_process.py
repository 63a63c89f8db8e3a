"""Processes of fork servers: what a failed start leaves, the error text, and the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from turnwise_python_sandbox import SandboxConfig, SandboxUnavailableError, Tier, server_process
from turnwise_python_sandbox.interpreter import Interpreter
from turnwise_python_sandbox.left_files import create_directory, remove_directory
from turnwise_python_sandbox.server_command import ServerSpec
from turnwise_python_sandbox.server_process import ServerProcess, start_server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_process(code: str, directory: str | None = None) -> ServerProcess:
    """Start a process in place of a fork server, and wait for its first byte."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the process object closes it
    fd = theirs.fileno()
    prelude = f"import os, signal, socket, sys\ncontrol = socket.socket(fileno={fd})\n"
    command = [sys.executable, "-c", f"{prelude}{code}"]
    process = subprocess.Popen(command, pass_fds=[fd], stderr=errors)
    theirs.close()
    return ServerProcess(process=process, control=ours, errors=errors, directory=directory)


def make_spec(tier: Tier) -> ServerSpec:
    """Return a spec whose interpreter does not exist."""
    interpreter = Interpreter(executable="/no/such/python", home="/no/such", packages=())
    return ServerSpec(tier=tier, interpreter=interpreter, config=SandboxConfig(), uid=None)


@pytest.mark.own_process
def test_a_failed_start_leaves_nothing(folder: Path) -> None:
    """If the interpreter cannot be executed, no descriptor and no directory is left."""
    remove_directory(create_directory("first-"))  # the process that removes directories has a pipe
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        start_server(make_spec(Tier.LANDLOCK))

    assert len(os.listdir("/proc/self/fd")) == before
    assert [] == list(folder.iterdir())


@pytest.mark.own_process
def test_a_missing_bubblewrap_leaves_nothing(folder: Path, monkeypatch) -> None:
    """If bubblewrap is missing, the start fails before anything is created."""
    monkeypatch.setattr("turnwise_python_sandbox.server_command.shutil.which", lambda _name: None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        start_server(make_spec(Tier.NAMESPACES))

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_server_stops_with_its_socket(folder: Path) -> None:
    """`stop` closes the socket, waits for the exit, and removes the programs' files."""
    (folder / "programs/1").mkdir(parents=True)
    (folder / "programs/1/file").touch()
    started = start_process("control.send(b'up')\ncontrol.recv(1)", str(folder / "programs"))
    assert b"up" == started.control.recv(10)
    started.stop()

    assert started.process.returncode == 0
    assert not (folder / "programs").exists()


def test_a_server_that_ignores_its_socket_is_killed(monkeypatch) -> None:
    """A server that does not exit in time receives SIGKILL."""
    monkeypatch.setattr(server_process, "_EXIT_TIMEOUT_S", 0.05)
    started = start_process("control.send(b'up')\nsignal.pause()")
    assert b"up" == started.control.recv(10)
    started.stop()

    assert started.process.returncode == -9


def test_a_dead_server_is_stopped_without_an_error(folder: Path) -> None:
    """`stop` after the death of the server, and of its directory, does nothing."""
    started = start_process("pass", str(folder / "gone"))
    started.process.wait()
    started.stop()

    assert started.process.returncode == 0


def test_the_error_text_is_the_end_of_standard_error() -> None:
    """At most 2,000 bytes are kept, the last ones, and bytes that are not UTF-8 are replaced."""
    started = start_process("os.write(2, b'first' + b'x' * 5000 + b'\\xff last words\\n')")
    started.process.wait()
    text = started.read_errors()
    started.stop()

    assert text.endswith("\ufffd last words")
    assert "first" not in text
    assert len(text) < 2001
