"""
Runs `turnwise` in this process, and makes a fault at a moment of the command.

Usage: python tests/end_faults.py COMMAND ... with the fault as JSON in the variable `TURNWISE_END`: `function`, `count`
and `ending` of a moment, the `fault`, and the folder `out` of the run.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "TURNWISE_END"
MARK = "TURNWISE_TEST_RUN"
"""Variable in the environment of every process of a run, Ray's included."""
PARTS_OF_RAY = {"raylet": "raylet", "GCS": "gcs_server"}
HANDLED_S = 20.0
"""The longest wait of another thread for the signal's handler, which a busy main thread may delay."""


def marked_processes(folder: str) -> dict[int, str]:
    """Return the command lines of the processes of a run by process id, the calling one aside."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            marks = (process / "environ").read_bytes().split(b"\0")
            if f"{MARK}={folder}".encode() in marks and int(process.name) != os.getpid():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line:  # a zombie has none
                    found[int(process.name)] = line
    return found


class Fault:
    """A fault that is made once, in this process or in one that it has started."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.handled = threading.Event()
        self.sent = False

    def make(self) -> None:
        """Make the fault; a signal has been handled when this returns."""
        kind, _, how = self.name.partition(" ")
        if kind.startswith("SIG"):
            self.sent = True
            os.kill(os.getpid(), getattr(signal, kind))
            self.handled.wait(HANDLED_S)
        elif self.name == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self.name == "folder gone":
            # One step, because another thread may write to the folder while its files are removed.
            shutil.rmtree(self.out.rename(self.out.with_name("removed")), ignore_errors=True)
        elif self.name == "replicas lost":
            threading.Thread(target=self._kill_replicas, daemon=True).start()
        elif kind in PARTS_OF_RAY:
            sent = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
            for process, line in marked_processes(os.environ[MARK]).items():
                if Path(line.split()[0]).name == PARTS_OF_RAY[kind]:
                    os.kill(process, sent)

    def _kill_replicas(self) -> None:
        """Kill each replica that there is, and each one that starts in its place."""
        pause = threading.Event()
        while not pause.wait(0.05):
            for process, line in marked_processes(os.environ[MARK]).items():
                if "ReplicaActor" in line:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    def watch_handlers(self) -> None:
        """Note when a handler of the command has handled the signal; then send the second one, if there is one."""
        install = signal.signal

        def watched(number: int, handler: Any) -> Any:
            if not callable(handler) or hasattr(handler, "is_watched"):
                return install(number, handler)

            def handle(*arguments: Any) -> Any:
                try:
                    return handler(*arguments)
                finally:
                    self._note_handled()

            handle.is_watched = True  # type: ignore[attr-defined]  # an attribute of ours on a function
            return install(number, handle)

        signal.signal = watched

    def _note_handled(self) -> None:
        if self.sent and not self.handled.is_set():
            self.handled.set()
            if self.name == "SIGINT twice":
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT), daemon=True).start()


def call_before(function: str, count: int, ending: str, call: Callable[[], None]) -> None:
    """Call something once, before a call of a function."""
    module, _, name = function.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = name.split(".")
    for each in owners:
        owner = getattr(owner, each)
    original = getattr(owner, name)
    left = [count]

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not ending or any(str(each).endswith(ending) for each in arguments):
            left[0] -= 1
            if left[0] == 0:
                call()
        return original(*arguments, **options)

    setattr(owner, name, wrapped)
    # Modules that have imported a function by its name call that one.
    for other in [each for key, each in sys.modules.items() if key.startswith("turnwise")]:
        for own, value in list(vars(other).items()):
            if value is original:
                setattr(other, own, wrapped)


def main() -> int:
    """Run the command and return its exit code."""
    if text := os.environ.pop(VARIABLE, ""):
        options = json.loads(text)
        fault = Fault(options["fault"], Path(options["out"]))
        fault.watch_handlers()

        def make() -> None:
            Path(options["note"]).touch()
            fault.make()

        call_before(options["function"], options["count"], options["ending"], make)
    from turnwise.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
