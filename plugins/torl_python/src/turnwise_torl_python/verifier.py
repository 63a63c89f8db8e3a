"""
Compares answers with math-verify in separate processes.

A model may write an answer on which sympy runs for ever or exhausts the memory. It must fail one comparison and not the
run, and math-verify's own time limit works only in a main thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from turnwise.errors import InfrastructureError
from turnwise_torl_python.verifier_process import OUT_OF_MEMORY

MAX_ANSWER_CHARS: Final = 2000
"""Longer answers are wrong without a comparison."""

_EXIT_TIMEOUT_S: Final = 10.0
_LIMIT_REACHED: Final = (-signal.SIGALRM, OUT_OF_MEMORY)
"""Exit codes of a process that its own timer, or its own limit of memory, has ended."""
_PURE_PYTHON: Final = {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
"""Where gmpy2 is installed: it aborts the process at the limit of memory, which no one could tell from a defect."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")


class AnswerVerifier:
    """
    A pool of processes that compare answers. Each process starts when it is first needed.

    Args:
        timeout_s: longest comparison in seconds.
        num_processes: size of the pool.
    """

    def __init__(self, timeout_s: float, num_processes: int) -> None:
        self._timeout_s = timeout_s
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="turnwise-torl-math")
        self._running: set[subprocess.Popen[str]] = set()

    async def equals(self, truth: str, answer: str) -> bool:
        """
        Return whether an answer equals the ground truth; False if the comparison takes too much time or memory.

        Raises:
            InfrastructureError: the process does not start, or something else than its own limits has ended it, such as
                the kernel for lack of memory on the machine. So nothing is known about the answer.
        """
        truth, answer = truth.strip().strip("$").strip(), answer.strip().strip("$").strip()
        if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(answer):
            return int(truth) == int(answer)
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return False
        if truth == answer:
            return True
        return await asyncio.wrap_future(self._threads.submit(self._compare, truth, answer))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True)
        for process in tuple(self._running):
            self._end(process)

    def _compare(self, truth: str, answer: str) -> bool:
        process = self._ready_process()
        verdict = _request(process, json.dumps([truth, answer]))
        if verdict not in ("true\n", "false\n"):
            self._own.process = None
            # Its pipe is at its end, so that it has exited or is about to; a kill would hide how.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIMEOUT_S)
            self._end(process)
            if process.returncode not in _LIMIT_REACHED:
                raise InfrastructureError(f"the comparison of answers ended with {_describe(process.returncode)}")
        return verdict == "true\n"

    def _ready_process(self) -> subprocess.Popen[str]:
        """Return this thread's process, after a restart if it has died."""
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is not None and process.poll() is not None:
            self._end(process)
            process = None
        if process is None:
            process = self._own.process = self._start()
        return process

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise_torl_python.verifier_process", str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | _PURE_PYTHON,
            start_new_session=True,  # an interrupt from the keyboard must reach only the run
        )
        self._running.add(process)
        if _read_line(process) != "ready\n":
            last_line = self._end(process).rstrip().rpartition("\n")[2]
            raise InfrastructureError(f"math-verify does not start: {last_line}")
        return process

    def _end(self, process: subprocess.Popen[str]) -> str:
        """End a process and return its standard error."""
        self._running.discard(process)
        process.kill()
        return process.communicate()[1]


def _request(process: subprocess.Popen[str], line: str) -> str:
    """Return the answer to a line; empty if the process has ended."""
    assert process.stdin is not None
    # A process that has ended since the last request reads nothing.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return _read_line(process)


def _describe(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def _read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line; empty if the process has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


@lru_cache(maxsize=4)
def shared_verifier(timeout_s: float, num_processes: int) -> AnswerVerifier:
    """Return the verifier of this process for these limits; it is closed when the process exits."""
    verifier = AnswerVerifier(timeout_s, num_processes)
    atexit.register(verifier.close)
    return verifier


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=shared_verifier.cache_clear)
