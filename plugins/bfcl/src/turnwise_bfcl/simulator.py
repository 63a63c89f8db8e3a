"""
The simulated programs of the leaderboard, for tools and rewards: a process that runs them, and a thread that asks it.

In a process, because a call such as `power(10, 10**12)` holds a thread for ever, and a process can be ended.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

from turnwise.errors import InfrastructureError
from turnwise.types import JsonDict
from turnwise_bfcl.data_files import fetch_wheel

CPU_S: Final = 5.0
"""Seconds of processor for the calls of an episode; they need milliseconds. The load of the machine is not counted."""
_TRIES: Final = 2


class ExhaustedError(Exception):
    """The calls need too much time or memory, which is the model's doing."""


class Simulator:
    """One process at a time, which starts with the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turnwise-bfcl")

    async def ask(self, request: JsonDict) -> JsonDict:
        """
        Return the answer to a request of `turnwise_bfcl.simulation`.

        Raises:
            ExhaustedError: the calls take too much time or memory.
            DataError: the wheel cannot be fetched.
            InfrastructureError: the process does not start, or ends by something else, twice in a row.
        """
        line = json.dumps(request) + "\n"
        return await asyncio.wrap_future(self._thread.submit(self._ask, line))

    async def rest(self) -> None:
        """End the process until the next request."""
        await asyncio.wrap_future(self._thread.submit(self._end))

    def close(self) -> None:
        """End the process for good."""
        self._thread.shutdown(wait=True)
        self._end()

    def _ask(self, line: str) -> JsonDict:
        how = ""
        for _ in range(_TRIES):
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # the end of its answers tells how it ended
                process.stdin.write(line)
                process.stdin.flush()
            answer = process.stdout.readline()
            if answer.endswith("\n"):
                found: JsonDict = json.loads(answer)
                if found.get("exhausted"):
                    raise ExhaustedError
                return found
            how = self._end()
            if process.returncode == -signal.SIGPROF:
                raise ExhaustedError
        raise InfrastructureError(f"the process with the programs of BFCL ended: {how}")

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "turnwise_bfcl.simulation", str(fetch_wheel()), str(CPU_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard must reach only the run
        )
        return self._process

    def _end(self) -> str:
        """End the process, and return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        # It exits by itself when its pipe is at an end; a kill would hide how.
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * CPU_S)
        process.kill()
        assert process.stderr is not None
        last_line = process.stderr.read().rstrip().rpartition("\n")[2]
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        return f"{process.returncode} {last_line}".rstrip()


@cache
def shared_simulator() -> Simulator:
    """Return the simulator of this process, which is closed when the process exits."""
    simulator = Simulator()
    atexit.register(simulator.close)
    return simulator


if hasattr(os, "register_at_fork"):  # a forked child has no threads
    os.register_at_fork(after_in_child=shared_simulator.cache_clear)
