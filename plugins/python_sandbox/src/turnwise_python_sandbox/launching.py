"""The command lines that start a fork server, for each tier."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Final

from attrs import define, field, frozen

from turnwise_python_sandbox.box.workspace import remove_tree
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import BOOTSTRAP, DEVICES, PACKAGE, Interpreter, barrier
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier

_PLACES: Final = ("/tmp", "/sandbox")
"""Directories of the box where programs have their own files; the first that hides nothing they need."""
_FIRST_PASSED_FD: Final = 200
_FIRST_UID: Final = 60100
_NUM_UIDS: Final = 4096
_PATIENCE_S: Final = 2.0
_FLAGS: Final = ("-S", "-s", "-P", "-X", "utf8")
"""No site, no user site, no script directory; the environment is the sandbox's own, so it may be read."""
ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Numeric libraries would start a thread per core in the server, and threads do not survive a fork."""


@frozen(kw_only=True)
class Recipe:
    """
    What it takes to start a server.

    Attributes:
        tier: `NAMESPACES` or `LANDLOCK`.
        interpreter: which Python.
        config: limits, preload list and readable paths.
        uid: unprivileged user to become; None when this process is not root.
    """

    tier: Tier
    interpreter: Interpreter
    config: SandboxConfig
    uid: int | None


@define(eq=False)
class Spawned:
    """A server process that was started: its process, its socket, its standard errors and its directory, if any."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    errors: IO[bytes]
    directory: str | None = None

    def error_text(self) -> str:
        """Return the end of what the process wrote to standard errors."""
        self.errors.seek(0)
        return self.errors.read()[-2000:].decode("utf-8", "replace").strip()

    def end(self) -> None:
        """Kill the process, and with it its programs, and take away what they left. Idempotent."""
        self.control.close()
        try:
            # It ends with its socket, and kills its programs before.
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        if self.directory:
            remove_tree(self.directory)


def unprivileged_uid() -> int | None:
    """Return a user id that no account has, for a process of root's; None for anyone else."""
    if os.geteuid() != 0:
        return None
    for offset in range(_NUM_UIDS):
        uid = _FIRST_UID + (os.getpid() + offset) % _NUM_UIDS
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    raise SandboxUnavailableError(f"every user id from {_FIRST_UID} to {_FIRST_UID + _NUM_UIDS} has an account")


def spawn(recipe: Recipe) -> Spawned:
    """Start a server; it answers with `Ready` when it is up. Call it from a thread that outlives the server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
    passed = _Passed()
    directory = None
    try:
        if recipe.tier is Tier.NAMESPACES:
            command = _namespaces_command(recipe, theirs.fileno())
        else:
            directory = _directory(recipe.uid)
            command = _landlock_command(recipe, theirs.fileno(), directory, passed)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(recipe, passed),
            pass_fds=(theirs.fileno(), *passed.fds),
            start_new_session=True,
            cwd="/",
        )
    except BaseException:
        ours.close()
        errors.close()
        if directory:
            remove_tree(directory)
        raise
    finally:
        theirs.close()
        passed.close()
    return Spawned(process=process, control=ours, errors=errors, directory=directory)


@define
class _Passed:
    """Files that a server reaches through inherited descriptors, since their paths are closed to its user."""

    fds: list[int] = field(factory=list)
    _aliases: dict[str, str] = field(factory=dict)

    def alias(self, path: str, uid: int | None) -> str:
        """Return the path itself where the user can reach it, or one through a descriptor."""
        if uid is None or barrier(path, uid) is None:
            return path
        if path not in self._aliases:
            opened = os.open(path, os.O_PATH)
            try:
                fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_PASSED_FD)
            finally:
                os.close(opened)
            self.fds.append(fd)
            self._aliases[path] = f"/proc/self/fd/{fd}"
        return self._aliases[path]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def environment(recipe: Recipe, passed: _Passed | None = None) -> dict[str, str]:
    """Return the environment of everything in the sandbox, made from nothing."""
    home = passed.alias(recipe.interpreter.home, recipe.uid) if passed and recipe.tier is Tier.LANDLOCK else ""
    hidden = home.startswith("/proc/") and {"LD_LIBRARY_PATH": f"{home}/lib"}
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "USER": "sandbox",
        "MPLBACKEND": "Agg",
        "PYTHONHOME": home or recipe.interpreter.home,
        "PYTHONDONTWRITEBYTECODE": "1",
        # The same program gives the same output in every server.
        "PYTHONHASHSEED": "0",
        **ONE_THREAD,
        **(hidden or {}),
    }


def _settings(recipe: Recipe, control: int, **more: Any) -> str:
    max_threads = recipe.config.max_threads
    common = {
        "control": control,
        "namespaces": recipe.tier is Tier.NAMESPACES,
        "devices": DEVICES,
        "preload": recipe.config.preload,
        # Outside a user namespace the kernel counts all processes of a user, and ours may have many.
        "max_threads": max_threads if recipe.tier is Tier.NAMESPACES or recipe.uid is not None else 0,
    }
    return json.dumps(common | more)


def _as_user(recipe: Recipe, covers: Mapping[str, Sequence[str]], command: Sequence[str]) -> list[str]:
    if recipe.uid is None:
        return list(command)
    settings = json.dumps({"uid": recipe.uid, "covers": covers, "command": command})
    return [recipe.interpreter.executable, "-S", "-c", BOOTSTRAP, PACKAGE, "launch", settings]


def _namespaces_command(recipe: Recipe, control: int) -> list[str]:
    readable = recipe.interpreter.readable(recipe.config.readable)
    packages = recipe.interpreter.packages
    settings = _settings(recipe, control, place=_place(readable), readable=readable, keep=(), path=packages)
    return boxed(recipe, ["-c", BOOTSTRAP, PACKAGE, "server", settings])


def boxed(recipe: Recipe, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the interpreter with some arguments inside bubblewrap."""
    shown = {*recipe.interpreter.readable(recipe.config.readable), PACKAGE}
    python = [recipe.interpreter.executable, *_FLAGS, *arguments]
    box = bubblewrap_arguments(sorted(shown), _place(shown))
    return _as_user(recipe, _covers(shown, recipe.uid), [*box, *python])


def _place(shown: Iterable[str]) -> str:
    """Return where programs have their files: an interpreter in /tmp must not vanish behind them."""
    return next((p for p in _PLACES if not any(path.startswith(f"{p}/") for path in shown)), _PLACES[-1])


def _covers(paths: set[str], uid: int | None) -> dict[str, list[str]]:
    covers: dict[str, list[str]] = {}
    for path in sorted(paths):
        in_the_way = None if uid is None else barrier(path, uid)
        if in_the_way:
            covers.setdefault(in_the_way, []).append(path)
    return covers


def bubblewrap_arguments(readable: Sequence[str], place: str) -> list[str]:
    """
    Return bubblewrap's part of the command line.

    The box has the readable paths, five devices and an empty directory, nothing else and nothing writable; no /proc
    at all. CAP_SYS_ADMIN counts in the box's own user namespace, and only the server has it.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailableError("bubblewrap is not installed (Debian, Ubuntu: apt-get install bubblewrap)")
    binds = [part for path in readable for part in ("--ro-bind", path, path)]
    devices = [part for path in DEVICES for part in ("--dev-bind", path, path)]
    return [
        *(program, "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
        *binds,
        *devices,
        *("--dir", place, "--remount-ro", "/", "--chdir", place),
    ]


def _landlock_command(recipe: Recipe, control: int, directory: str, passed: _Passed) -> list[str]:
    interpreter, uid = recipe.interpreter, recipe.uid
    readable = [passed.alias(path, uid) for path in interpreter.readable(recipe.config.readable)]
    packages = [passed.alias(path, uid) for path in interpreter.packages]
    executable, package = passed.alias(interpreter.executable, uid), passed.alias(PACKAGE, uid)
    passed.alias(interpreter.home, uid)
    settings = _settings(recipe, control, place=directory, readable=readable, path=packages, keep=passed.fds)
    return _as_user(recipe, {}, [executable, *_FLAGS, "-c", BOOTSTRAP, package, "server", settings])


def _directory(uid: int | None) -> str:
    directory = tempfile.mkdtemp(prefix="turnwise-sandbox-")
    if uid is not None:
        os.chown(directory, uid, uid)
    return directory
