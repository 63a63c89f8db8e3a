"""Runs simulations in several processes, for `turnwise check --simulate`, and collects the failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final

from attrs import define, field, frozen

from turnwise_testing.simulation.worker import HUNG

_CHUNK: Final = 500
"""Seeds of one process, which bounds the memory that failed runs leave behind."""


@frozen(kw_only=True)
class Failure:
    """A seed that failed: its scenario, and the error as text."""

    scenario: str
    seed: int
    error: str

    @property
    def replay(self) -> str:
        """The arguments of `turnwise check` that run the seed again."""
        return f"--simulate {self.scenario} --first-seed {self.seed} --seeds 1"


@define
class Tally:
    """
    Counts of a scenario's runs.

    Attributes:
        passed: seeds without a failure.
        cpu_s: processor seconds of all runs.
        failures: in the order in which they were found.
    """

    passed: int = 0
    cpu_s: float = 0.0
    failures: list[Failure] = field(factory=list)


def simulate(
    scenario: str,
    seeds: range,
    num_processes: int,
    progress: Callable[[Tally], None] = lambda _tally: None,
    max_failures: int | None = None,
) -> Tally:
    """
    Run a scenario with some seeds.

    Args:
        scenario: name, `module:Class` or `file.py:Class`.
        seeds: to run; the processes share them.
        num_processes: that run at the same time.
        progress: called after each message of a process.
        max_failures: stop after so many; None runs all seeds.

    Raises:
        RuntimeError: a process ended with an error; it has printed the reason.
    """
    tally = Tally()
    for start in range(0, len(seeds), _CHUNK * num_processes):
        chunk = seeds[start : start + _CHUNK * num_processes]
        with _started(scenario, chunk, num_processes) as messages:
            for message in messages:
                _add(tally, scenario, message)
                progress(tally)
                if max_failures is not None and len(tally.failures) >= max_failures:
                    return tally
    return tally


def _add(tally: Tally, scenario: str, message: dict[str, Any]) -> None:
    if "exit" in message:
        raise RuntimeError(f"a process of the simulation {scenario} ended with code {message['exit']}")
    tally.passed += message["passed"]
    tally.cpu_s += message["cpu_s"]
    if "error" in message:
        tally.failures.append(Failure(scenario=scenario, seed=message["seed"], error=message["error"]))


@contextmanager
def _started(scenario: str, seeds: range, num_processes: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the processes; yield an iterator over their messages, and end them at exit."""
    messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    parts = [part for number in range(num_processes) if (part := seeds[number::num_processes])]
    # Another command beside this one has another process id, and so starts with another core in most cases.
    first_core = os.getpid()
    runs = [_PartRun(_command(scenario, first_core + number), part, messages) for number, part in enumerate(parts)]
    for run in runs:
        run.start()
    try:
        yield _until_all_ended(messages, len(runs))
    finally:
        for run in runs:
            run.stop()


class _PartRun(threading.Thread):
    """Runs some seeds in a process, and after a seed that hangs the rest in a new one."""

    def __init__(self, command: Sequence[str], part: range, messages: SimpleQueue[dict[str, Any] | None]) -> None:
        super().__init__(daemon=True)
        self._command, self._part, self._messages = command, part, messages
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while self._part and not self._stopping.is_set():
                self._part = self._run_process(self._part)
        finally:
            self._messages.put(None)

    def stop(self) -> None:
        """End the process and the thread."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()
        self.join()

    def _run_process(self, part: range) -> range:
        """Run seeds in a process; return the seeds that are left if one of them hung."""
        # One hash seed for all processes, because the order of sets of texts is a part of a run.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        last: int | None = None
        command = [*self._command, *map(str, (part.start, len(part), part.step))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            self._process = process
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    message = json.loads(line)
                    last = message.get("seed", last)
                    self._messages.put(message)
        if process.returncode == HUNG and last is not None:
            return part[part.index(last) + 1 :]
        if process.returncode and not self._stopping.is_set():
            self._messages.put({"exit": process.returncode})
        return part[:0]


def _command(scenario: str, core: int) -> Sequence[str]:
    """Return the command of a process without its seeds. One of its threads runs at a time, so it needs one core."""
    return [sys.executable, "-m", "turnwise_testing.simulation", scenario, "--core", str(core)]


def _until_all_ended(messages: SimpleQueue[dict[str, Any] | None], num: int) -> Iterator[dict[str, Any]]:
    while num:
        message = messages.get()
        if message is None:
            num -= 1
        else:
            yield message
