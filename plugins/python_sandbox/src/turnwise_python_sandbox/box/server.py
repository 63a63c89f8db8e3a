"""Starts a fork server: prepares the interpreter, preloads modules, builds the confinement, serves."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import signal
import socket
import sys
from typing import Any, Final

from turnwise_python_sandbox.box import confinement, kernel, landlock, messages, preload, seccomp
from turnwise_python_sandbox.box.confinement import Confinement
from turnwise_python_sandbox.box.directory_isolation import DirectoryIsolation
from turnwise_python_sandbox.box.fork_server import ForkServer
from turnwise_python_sandbox.box.isolation import Isolation
from turnwise_python_sandbox.box.messages import Ready
from turnwise_python_sandbox.box.namespace_isolation import NamespaceIsolation

_COMMON_MODULES: Final = (
    "abc array bisect cmath collections copy datetime decimal enum fractions functools heapq io itertools json "
    "linecache math operator os random re statistics string struct sys textwrap threading time traceback typing"
)
"""Nearly every program imports these. Each further module makes every fork slower, and saves few programs time."""


def main(settings_text: str) -> None:
    """
    Serve until the supervisor closes its end of the control socket.

    Args:
        settings_text: JSON with the keys ``control_fd``, ``namespaces`` (tier 1 or 2), ``workspace_root``,
            ``readable`` and ``devices`` (paths), ``inherited_fds``, ``import_path`` (directories to append to
            `sys.path`), ``preload`` (module names), ``max_threads``, ``dedicated_user`` (the programs' user owns no
            other file) and ``max_landlock_abi`` (None for the kernel's).
    """
    settings = json.loads(settings_text)
    control = socket.socket(fileno=settings["control_fd"])
    # Closed also when the supervisor has been killed in the meantime: nobody else would remove the shared files.
    with contextlib.closing(_create_isolation(settings)) as isolation:
        _serve(settings, control, isolation)


def _serve(settings: dict[str, Any], control: socket.socket, isolation: Isolation) -> None:
    _harden_process(settings["namespaces"])
    abi = min(landlock.detect_abi(), settings["max_landlock_abi"] or sys.maxsize)
    if not abi and not settings["namespaces"]:
        sys.exit("this kernel has no Landlock, or the container hides it")
    sys.path += settings["import_path"]
    missing = preload.preload_modules([*_COMMON_MODULES.split(), *settings["preload"]])
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]  # a real file
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as above
    server = ForkServer(control, isolation, _build_confinement(settings, abi))
    control.send(messages.encode(Ready(abi, missing)))
    # Frozen objects are never visited by the collector, so that forks do not copy their pages.
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve()


def _harden_process(namespaces: bool) -> None:
    # A shell that starts a process in the background makes it ignore SIGINT, which forks inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not namespaces:
        # Keeps programs of the same user out of this process. In tier 1 they cannot name it, and setns needs the flag.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prefer_for_oom_kill()


def _create_isolation(settings: dict[str, Any]) -> Isolation:
    root = settings["workspace_root"]
    return NamespaceIsolation(root, settings["devices"]) if settings["namespaces"] else DirectoryIsolation(root)


def _build_confinement(settings: dict[str, Any], abi: int) -> Confinement:
    readable = landlock.open_path_rules(settings["readable"], writable=False)
    devices = landlock.open_path_rules(settings["devices"], writable=True)
    protection = seccomp.FileProtection(
        read_only_mounts=settings["namespaces"],
        dedicated_user=settings["dedicated_user"],
        truncation=abi >= landlock.TRUNCATION_ABI,
    )
    return Confinement(
        ruleset=landlock.Ruleset((*readable, *devices), abi) if abi else None,
        seccomp_filter=seccomp.assemble_filter(protection),
        max_threads=settings["max_threads"],
        address_space=confinement.measure_address_space(),
        inherited_fds=settings["inherited_fds"],
        protection=protection,
    )
