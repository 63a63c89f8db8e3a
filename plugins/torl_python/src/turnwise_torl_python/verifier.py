"""
Compares answers with math-verify, in processes of its own.

A model may write an answer that sympy never finishes or that takes all memory: it must cost one comparison and not the
run, and math-verify's own time limit works in no thread but the main one.
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
"""Longer answers are wrong without a look."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")


class Judge:
    """
    A few processes that compare answers, started when they are needed.

    Args:
        timeout_s: for one comparison.
        num_processes: comparisons at a time.
    """

    def __init__(self, timeout_s: float, num_processes: int) -> None:
        self._timeout_s = timeout_s
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="turnwise-torl-math")
        self._running: set[subprocess.Popen[str]] = set()

    async def equals(self, truth: str, answer: str) -> bool:
        """
        Return whether an answer means the same as the ground truth; one that takes too long does not.

        Raises:
            InfrastructureError: the process cannot be started; it says nothing about the answer.
        """
        truth, answer = truth.strip().strip("$").strip(), answer.strip().strip("$").strip()
        if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(answer):
            return int(truth) == int(answer)
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return False
        if truth == answer:
            return True
        return await asyncio.wrap_future(self._threads.submit(self._ask, truth, answer))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True)
        for process in tuple(self._running):
            self._end(process)

    def _ask(self, truth: str, answer: str) -> bool:
        process = self._process()
        verdict = _asked(process, json.dumps([truth, answer]))
        if not verdict:  # its timer ended it
            self._own.process = None
            self._end(process)
        return verdict == "true\n"

    def _process(self) -> subprocess.Popen[str]:
        """Return this thread's process, alive and ready."""
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is not None and process.poll() is not None:
            self._end(process)
            process = None
        if process is None:
            process = self._own.process = self._started()
        return process

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise_torl_python.judge_process", str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is for the run
        )
        self._running.add(process)
        if _answer(process) != "ready\n":
            last_line = self._end(process).rstrip().rpartition("\n")[2]
            raise InfrastructureError(f"math-verify does not start: {last_line}")
        return process

    def _end(self, process: subprocess.Popen[str]) -> str:
        """End a process and return what it wrote to standard errors."""
        self._running.discard(process)
        process.kill()
        return process.communicate()[1]


def _asked(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> str:
    """Return the next line; empty when the process has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


@lru_cache(maxsize=4)
def shared_judge(timeout_s: float, num_processes: int) -> Judge:
    """Return the judge of this process for these limits; it ends with the process."""
    judge = Judge(timeout_s, num_processes)
    atexit.register(judge.close)
    return judge


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=shared_judge.cache_clear)
