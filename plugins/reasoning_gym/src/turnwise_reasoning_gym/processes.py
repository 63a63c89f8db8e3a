"""
Processes with reasoning-gym, which make tasks and score answers.

Importing the package takes seconds, loads matplotlib and prints. Some of its data sets evaluate the answer of a model
as Python, and an answer such as `9**9**9**9` would hold a thread for ever; a process can be ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Final, Self

from turnwise.errors import InfrastructureError
from turnwise.types import JsonDict

CLOCK_FACTOR: Final = 10
"""Seconds of the clock for each second of the processor that a score may take."""
_EXIT_TIMEOUT_S: Final = 10.0
_SETTINGS: Final = {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
"""The order of sets of texts, which reaches the tasks of some data sets; and matplotlib asks for no display."""


class GymProcess:
    """
    One process, which reads and writes lines of JSON. It starts with the first request.

    Args:
        arguments: of `turnwise_reasoning_gym.gym_process`.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: JsonDict) -> JsonDict:
        """
        Return the answer to a request.

        Raises:
            TimeoutError: the process ended itself, because the request took too long a time of the processor.
            InfrastructureError: it does not start, it waited for too long, or something else has ended it.
        """
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` tells how it ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self.read()

    def read(self) -> JsonDict:
        """Return the next answer; it raises what `ask` raises."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            found: JsonDict = json.loads(line)
            return found
        process = self._process
        # Its pipe is at its end, so that it exits by itself; a kill would hide how.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_TIMEOUT_S)
        errors = self.close()
        if process.returncode == -signal.SIGPROF:
            raise TimeoutError
        if process.returncode == -signal.SIGALRM:
            limit_s = float(self._arguments[-1])
            raise InfrastructureError(
                f"scoring took more than {CLOCK_FACTOR * limit_s:g} seconds and less than {limit_s:g} of the processor;"
                " the machine is too busy, or the answer waits"
            )
        last_line = errors.rstrip().rpartition("\n")[2]
        raise InfrastructureError(f"the process with reasoning-gym ended with {process.returncode}: {last_line}")

    def close(self) -> str:
        """End the process and return its standard error; the next request starts another one."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        return process.communicate()[1]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise_reasoning_gym.gym_process", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | _SETTINGS,
            start_new_session=True,  # an interrupt from the keyboard must reach only the run
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
