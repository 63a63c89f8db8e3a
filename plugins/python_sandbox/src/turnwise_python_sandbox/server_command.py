"""Command lines and environments of fork servers, for tiers 1 and 2."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import frozen

from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.inherited_paths import InheritedPaths
from turnwise_python_sandbox.interpreter import (
    BOOTSTRAP,
    DEVICES,
    PACKAGE,
    Interpreter,
    check_enterable,
    find_blocking_directory,
)
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier

_WORKSPACE_ROOTS: Final = ("/tmp", "/sandbox")
"""Candidates for the directory of the box in which programs have their files."""
_FIRST_UID: Final = 60100
_NUM_UIDS: Final = 4096
_FLAGS: Final = ("-S", "-s", "-P", "-X", "utf8")
"""No site, no user site, no script directory. The sandbox builds the environment, so Python may read it."""
_ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Otherwise numeric libraries start a thread per core in the server, and threads do not survive a fork."""


@frozen(kw_only=True)
class ServerSpec:
    """
    All that determines how a fork server is started.

    Attributes:
        tier: `NAMESPACES` or `LANDLOCK`.
        interpreter: the Python that it runs.
        config: limits, preload list and readable paths.
        uid: unprivileged user to become; None if this process does not run as root.
    """

    tier: Tier
    interpreter: Interpreter
    config: SandboxConfig
    uid: int | None


def find_unprivileged_uid() -> int | None:
    """Return a user id without an account if this process runs as root; otherwise None."""
    if os.geteuid() != 0:
        return None
    for offset in range(_NUM_UIDS):
        # Starts at the process id, so that several supervisors of one machine get different users.
        uid = _FIRST_UID + (os.getpid() + offset) % _NUM_UIDS
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    last = _FIRST_UID + _NUM_UIDS - 1
    raise SandboxUnavailableError(f"every user id from {_FIRST_UID} to {last} has an account; the sandbox needs one")


def build_environment(spec: ServerSpec, inherited: InheritedPaths | None = None) -> dict[str, str]:
    """Return the complete environment of a server and its programs; nothing of this process's is passed on."""
    home = spec.interpreter.home
    if inherited is not None and spec.tier is Tier.LANDLOCK:
        home = inherited.make_reachable(home, spec.uid)
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "USER": "sandbox",
        "MPLBACKEND": "Agg",
        "PYTHONHOME": home,
        "PYTHONDONTWRITEBYTECODE": "1",
        # The same program prints the same output in every server.
        "PYTHONHASHSEED": "0",
        **_ONE_THREAD,
    }
    if home.startswith("/proc/"):
        # The dynamic linker would look for libpython under the path that the user cannot reach.
        environment["LD_LIBRARY_PATH"] = f"{home}/lib"
    return environment


def build_namespaces_command(spec: ServerSpec, control_fd: int) -> list[str]:
    """Return the command of a tier 1 server, which bubblewrap runs."""
    readable = spec.interpreter.list_readable_paths(spec.config.readable)
    settings = _encode_settings(
        spec,
        control_fd,
        workspace_root=_choose_workspace_root({*readable, PACKAGE}),
        readable=readable,
        inherited_fds=(),
        import_path=spec.interpreter.packages,
    )
    return build_bubblewrap_command(spec, ["-c", BOOTSTRAP, PACKAGE, "server", settings])


def build_landlock_command(spec: ServerSpec, control_fd: int, directory: str, inherited: InheritedPaths) -> list[str]:
    """Return the command of a tier 2 server, whose programs have their files in `directory`."""
    interpreter, uid = spec.interpreter, spec.uid
    readable = [inherited.make_reachable(path, uid) for path in interpreter.list_readable_paths(spec.config.readable)]
    packages = [inherited.make_reachable(path, uid) for path in interpreter.packages]
    executable = inherited.make_reachable(interpreter.executable, uid)
    package = inherited.make_reachable(PACKAGE, uid)
    # Before the list of descriptors is written down: PYTHONHOME needs one too.
    inherited.make_reachable(interpreter.home, uid)
    # A program needs no descriptor of the executable, of this package, or of a folder that only Landlock is told about.
    kept = inherited.fds_of({interpreter.home, *interpreter.packages, *spec.config.readable})
    settings = _encode_settings(
        spec,
        control_fd,
        workspace_root=directory,
        readable=readable,
        inherited_fds=sorted(kept),
        import_path=packages,
    )
    return _run_as_user(spec, {}, [executable, *_FLAGS, "-c", BOOTSTRAP, package, "server", settings])


def build_bubblewrap_command(spec: ServerSpec, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the interpreter with the given arguments inside bubblewrap."""
    shown = {*spec.interpreter.list_readable_paths(spec.config.readable), PACKAGE}
    python = [spec.interpreter.executable, *_FLAGS, *arguments]
    box = build_bubblewrap_arguments(sorted(shown), _choose_workspace_root(shown))
    return _run_as_user(spec, _find_covers(shown, spec.uid), [*box, *python])


def build_bubblewrap_arguments(readable: Sequence[str], workspace_root: str) -> list[str]:
    """
    Return bubblewrap's part of the command line.

    The box has the readable paths, five devices and an empty directory. Nothing in it is writable, and it has no
    /proc. CAP_SYS_ADMIN counts in the user namespace of the box only, and programs drop it.
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
        *("--dir", workspace_root, "--remount-ro", "/", "--chdir", workspace_root),
    ]


def _encode_settings(spec: ServerSpec, control_fd: int, **tier_settings: object) -> str:
    """Return the settings of `box.server` as JSON."""
    max_threads = spec.config.max_threads
    common = {
        "control_fd": control_fd,
        "namespaces": spec.tier is Tier.NAMESPACES,
        "devices": DEVICES,
        "preload": spec.config.preload,
        "dedicated_user": spec.uid is not None,
        "max_landlock_abi": spec.config.max_landlock_abi,
        # Outside a user namespace the kernel counts all processes of the user, and this user may have many.
        "max_threads": max_threads if spec.tier is Tier.NAMESPACES or spec.uid is not None else 0,
    }
    return json.dumps(common | tier_settings)


def _run_as_user(spec: ServerSpec, covers: Mapping[str, Sequence[str]], command: Sequence[str]) -> list[str]:
    if spec.uid is None:
        return list(command)
    settings = json.dumps({"uid": spec.uid, "covers": covers, "command": command})
    return [spec.interpreter.executable, "-S", "-c", BOOTSTRAP, PACKAGE, "drop_privileges", settings]


def _choose_workspace_root(shown: Iterable[str]) -> str:
    """Return the first candidate that hides none of the shown paths: an interpreter in /tmp must stay visible."""
    paths = tuple(shown)
    free = (root for root in _WORKSPACE_ROOTS if not any(path.startswith(f"{root}/") for path in paths))
    return next(free, _WORKSPACE_ROOTS[-1])


def _find_covers(paths: set[str], uid: int | None) -> dict[str, list[str]]:
    """Return, by directory that the user cannot enter, the paths to show inside it."""
    covers: dict[str, list[str]] = {}
    for path in sorted(paths):
        if uid is None:
            continue
        check_enterable(path, uid)
        if blocking := find_blocking_directory(path, uid):
            covers.setdefault(blocking, []).append(path)
    return covers
