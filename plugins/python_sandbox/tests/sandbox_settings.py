"""
Sandboxes in every setting: each tier, started by root and by an ordinary user, with Landlock as older kernels have it.

Each comes with a victim: files of the user who runs the programs, which only the sandbox keeps from them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, interpreter, server_command, subprocess_backend
from turnwise_python_sandbox.interpreter import PACKAGE, find_blocking_directory
from turnwise_python_sandbox.server_command import find_unprivileged_uid

_ORDINARY_UID = 20_000 + os.getpid() % 10_000
"""Another user in every process that runs tests, because the kernel counts the threads of a user."""
_MAX_PROCESSES = 400
"""Limit of the ordinary user, which a program must not use up."""
_LIMITS = {"timeout_s": 60.0, "memory_mb": 256, "disk_mb": 16, "max_files": 200, "servers": 1, "max_in_flight": 4}


@frozen
class Setting:
    """
    One setting.

    Attributes:
        tier: 1 or 2.
        user: who starts the sandbox, "root" or "ordinary".
        abi: Landlock ABI at most; None for the kernel's.
    """

    tier: int
    user: str
    abi: int | None

    def __str__(self) -> str:
        return f"tier{self.tier}-{self.user}-abi{self.abi or 'newest'}"


GROWING_S = (0.5, 2.0, 10.0, 60.0)
"""Time limits in seconds for a program that acts and then never ends: a test takes the first that lets it act."""
SETTINGS = [Setting(tier, user, abi) for tier in (1, 2) for user in ("root", "ordinary") for abi in (1, 2, None)]


class Victim:
    """
    A folder of the user who runs the programs: `data.txt`, and `library`, which programs may read.

    If root starts the sandbox, that user owns no library, so that root does.
    """

    def __init__(self, owner: int, *, owns_library: bool) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="turnwise-victim-"))
        self.library = self.path / "library"
        self.library.mkdir()
        for file in (self.path / "data.txt", self.library / "module.py"):
            file.write_text("content = 1\n")
        for each in self._list():
            inside = each == self.library or self.library in each.parents
            if os.geteuid() == 0 and (owns_library or not inside):
                os.chown(each, owner, owner)
            each.chmod(0o755 if each.is_dir() else 0o644)

    def _list(self) -> list[Path]:
        return [self.path, *sorted(self.path.rglob("*"))]

    def describe(self) -> dict[str, object]:
        """Return all that a program might change."""
        found: dict[str, object] = {}
        for each in self._list():
            status = each.stat()
            content = each.read_text() if each.is_file() else ""
            found[str(each)] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content)
        return found

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)


class Host:
    """A process that runs a sandbox for one setting: this one, or a child that is an ordinary user."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        ordinary = setting.user == "ordinary"
        uid = _ORDINARY_UID if ordinary and os.geteuid() == 0 else None
        self.victim = Victim(uid or find_unprivileged_uid() or os.geteuid(), owns_library=ordinary)
        self._child: _Child | None = None
        self._package: ReachablePackage | None = None
        self._sandbox: Sandbox | None = None
        options: dict[str, Any] = {"tier": setting.tier, **_LIMITS}
        if setting.abi is not None:
            options["max_landlock_abi"] = setting.abi
        options["readable"] = [str(self.victim.library)]
        try:
            if uid is None:
                self._sandbox = Sandbox(**options).start()
            else:
                self._package = ReachablePackage(uid)
                self._child = _Child(uid, options | {"python": find_reachable_python(uid)}, self._package)
        except BaseException:
            self.close()
            raise

    def run(self, codes: Sequence[str], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Run programs at the same time, and return their results as JSON values."""
        return self._ask({"codes": list(codes), "timeout_s": timeout_s})

    def run_session(self, codes: Sequence[str], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Make the calls of one session, and return their results as JSON values."""
        return self._ask({"calls": list(codes), "timeout_s": timeout_s})

    def close(self) -> None:
        """End the sandbox and remove the victim."""
        if self._child is not None:
            self._child.close()
        if self._sandbox is not None:
            self._sandbox.close()
        if self._package is not None:
            self._package.remove()
        self.victim.remove()

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if self._child is not None:
            return self._child.ask(request)
        assert self._sandbox is not None
        return _answer(self._sandbox, request)


class ReachablePackage:
    """The sandbox's sources where a user can read them: a copy, if that user may not enter the checkout's folder."""

    def __init__(self, uid: int) -> None:
        self._copy: Path | None = None
        self.path = PACKAGE
        if find_blocking_directory(PACKAGE, uid) is not None:
            self._copy = Path(tempfile.mkdtemp(prefix="turnwise-package-", dir="/tmp"))
            self.path = str(shutil.copytree(PACKAGE, self._copy / "package"))
            for each in (self._copy, *self._copy.rglob("*")):
                each.chmod(0o755 if each.is_dir() else 0o644)

    def use(self) -> None:
        """Let this process start servers from these sources, and load all that it imports only when needed."""
        for module in pkgutil.walk_packages([PACKAGE], "turnwise_python_sandbox."):
            importlib.import_module(module.name)
        for each in (interpreter, server_command, subprocess_backend):
            each.PACKAGE = self.path

    def remove(self) -> None:
        """Remove the copy."""
        if self._copy is not None:
            shutil.rmtree(self._copy)


class _Child:
    """A forked child with another user, which serves requests; a program cannot tell it from a user's own process."""

    def __init__(self, uid: int, options: dict[str, Any], package: ReachablePackage) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                ours.close()
                package.use()
                _serve(theirs, uid, options)
            os._exit(0)
        theirs.close()
        self._stream = ours.makefile("rw")
        ours.close()
        failure = json.loads(self._stream.readline())
        if failure:
            self.close()
            raise SandboxUnavailableError(failure)

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())

    def close(self) -> None:
        self._stream.close()
        os.waitpid(self.pid, 0)


def _serve(connection: socket.socket, uid: int, options: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    tempfile.tempdir = None
    sys.executable = options["python"]  # the user's own interpreter; the sandbox starts a helper with it
    with connection.makefile("rw") as stream:
        try:
            sandbox = Sandbox(**options).start()
        except Exception as error:  # noqa: BLE001 - the parent reports it
            stream.write(json.dumps(f"{type(error).__name__}: {error}") + "\n")
            return
        stream.write('""\n')
        stream.flush()
        for line in stream:
            stream.write(json.dumps(_answer(sandbox, json.loads(line))) + "\n")
            stream.flush()
        sandbox.close()


def _answer(sandbox: Sandbox, request: dict[str, Any]) -> list[dict[str, Any]]:
    timeout_s = request["timeout_s"]
    if "calls" in request:
        with sandbox.session() as session:
            return [session.run(code, timeout_s=timeout_s).to_json() for code in request["calls"]]
    codes = request["codes"]
    with ThreadPoolExecutor(len(codes)) as threads:
        return [result.to_json() for result in threads.map(lambda code: sandbox.run(code, timeout_s=timeout_s), codes)]


def find_reachable_python(uid: int) -> str:
    """Return an interpreter that a user can run; raise `SandboxUnavailableError` if there is none."""
    blocked = []
    for path in (os.path.realpath(getattr(sys, "_base_executable", sys.executable)), "/usr/bin/python3"):
        if not os.path.exists(path):
            continue
        blocking = find_blocking_directory(path, uid)
        if blocking is None:
            return path
        blocked.append(f"it may not enter {blocking}, where {path} is")
    reasons = "; ".join(blocked) or "there is none"
    raise SandboxUnavailableError(f"an ordinary user can run no interpreter: {reasons}")
