"""
Compares answers with math-verify in separate processes.

A model may write an answer on which sympy runs for ever or exhausts the memory. It must fail one comparison and not the
run, and math-verify's own time limit works only in a main thread.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from turnwise.errors import InfrastructureError

MAX_ANSWER_CHARS: Final = 2000
"""Longer answers are wrong without a comparison."""

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
        Return whether an answer equals the ground truth; False if the comparison takes too long.

        Raises:
            InfrastructureError: the process does not start, so nothing is known about the answer.
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
        if not verdict:  # its timer has ended the process
            self._own.process = None
            self._end(process)
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
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return _read_line(process)


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
