"""Keeps the programs of a worker from outliving it, and their children from outliving them."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from attrs import define, field

from turnwise.threads import in_thread
from turnwise_gateway.programs import orphans

_WORKER: Final = secrets.token_hex(8)


@define(eq=False)
class ProgramKeeper:
    """
    Ends the processes of programs; one object for all event loops of a process.

    While a program runs, a separate process waits for the end of this one: an agent may close the descriptors that it
    inherits, and then nothing else tells it that its worker was killed.
    """

    _changes: threading.Lock = field(factory=threading.Lock, init=False)
    _sweeps: threading.Lock = field(factory=threading.Lock, init=False)
    _watcher: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _num_programs: int = field(default=0, init=False)
    _ended: set[str] = field(factory=set, init=False)

    @contextmanager
    def watch(self) -> Iterator[str]:
        """Keep the watching process up inside the `with` statement, and return a mark for a program."""
        with self._changes:
            self._num_programs += 1
            if self._watcher is None:
                self._watcher = _start_watcher()
        try:
            yield f"{_WORKER}.{secrets.token_hex(8)}"
        finally:
            with self._changes:
                self._num_programs -= 1
                if self._num_programs == 0:
                    watcher, self._watcher = self._watcher, None
                    assert watcher is not None, "it is started with the first program"
                    threading.Thread(target=watcher.communicate, args=(b"end",), daemon=True).start()

    async def sweep(self, mark: str) -> None:
        """Kill the processes that a program has left behind."""
        self._ended.add(mark)
        await in_thread(self._sweep, {"mark": mark})

    def _sweep(self, mark: str) -> None:
        # Programs that end during a look at all processes share the next one.
        with self._sweeps:
            if mark in self._ended:
                marks, self._ended = self._ended, set()
                orphans.kill_marked(marks)


KEEPER: Final = ProgramKeeper()


def _start_watcher() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", orphans.__file__, _WORKER]
    # In a separate session, so that a signal for the worker's group does not end it first.
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    watcher.wait()  # its fork stays
    return watcher
