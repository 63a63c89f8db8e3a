"""Processes of fork servers: start and end."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from typing import IO, Final

from attrs import define

from turnwise_python_sandbox.inherited_paths import InheritedPaths
from turnwise_python_sandbox.left_files import create_directory, remove_directory
from turnwise_python_sandbox.memory_cgroup import create_cgroup, remove_cgroup, run_in_cgroup
from turnwise_python_sandbox.result import Tier
from turnwise_python_sandbox.server_command import (
    ServerSpec,
    build_environment,
    build_landlock_command,
    build_namespaces_command,
)

_EXIT_TIMEOUT_S: Final = 2.0
_MAX_ERROR_BYTES: Final = 2000
_ENTER_ONLY: Final = 0o300
"""Its owner may use the names in a directory that it knows, and cannot list them."""


@define(eq=False)
class ServerProcess:
    """
    A running fork server.

    Attributes:
        process: the server, or bubblewrap around it.
        control: datagram socket to the server.
        errors: file with its standard error.
        directory: the programs' files; None in tier 1.
        cgroup: the cgroup of the server; None without one.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket
    errors: IO[bytes]
    directory: str | None = None
    cgroup: str | None = None

    def read_errors(self) -> str:
        """Return the end of the server's standard error."""
        self.errors.seek(0)
        return self.errors.read()[-_MAX_ERROR_BYTES:].decode("utf-8", "replace").strip()

    def stop(self) -> None:
        """Kill the server and its programs, and remove their files. Idempotent."""
        self.control.close()
        try:
            # A healthy server exits when its socket closes, after it has killed its programs.
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        if self.directory:
            remove_directory(self.directory)
        if self.cgroup:
            remove_cgroup(self.cgroup)


def start_server(spec: ServerSpec) -> ServerProcess:
    """
    Start a server; it sends `Ready` once it accepts launches.

    Call this from a thread that outlives the server: bubblewrap ends its box when the thread that started it ends.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
    inherited = InheritedPaths()
    directory = cgroup = None
    try:
        if spec.config.cgroup:
            cgroup = create_cgroup(spec.config.cgroup, spec.config.cgroup_memory_mb)
        if spec.tier is Tier.NAMESPACES:
            command = build_namespaces_command(spec, theirs.fileno())
        else:
            directory = _create_directory(spec.uid)
            command = build_landlock_command(spec, theirs.fileno(), directory, inherited)
        process = subprocess.Popen(
            run_in_cgroup(cgroup, command) if cgroup else command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=build_environment(spec, inherited),
            pass_fds=(theirs.fileno(), *inherited.fds),
            start_new_session=True,
            cwd="/",
        )
    except BaseException:
        ours.close()
        errors.close()
        if directory:
            remove_directory(directory)
        if cgroup:
            remove_cgroup(cgroup)
        raise
    finally:
        theirs.close()
        inherited.close()
    return ServerProcess(process=process, control=ours, errors=errors, directory=directory, cgroup=cgroup)


def _create_directory(uid: int | None) -> str:
    directory = create_directory("turnwise-sandbox-")
    if uid is not None:
        os.chown(directory, uid, uid)
    os.chmod(directory, _ENTER_ONLY)
    return directory
