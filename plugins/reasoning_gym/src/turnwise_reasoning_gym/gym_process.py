"""
A process with reasoning-gym, run as ``python -m turnwise_reasoning_gym.gym_process describe|rows|score [TIMEOUT_S]``.

It reads lines of JSON and answers with lines of JSON. Timers end it when scoring takes too long: nothing handles their
signals, so no loop of a library outlives them. Answers of a model are scored with no right to write files or to start
programs, and with little memory, which guards against accidents and not against an attacker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from turnwise.descriptors import reserve_stderr, reserve_stdout
from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_reasoning_gym.processes import CLOCK_FACTOR

_REFUSED: Final = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.")
_ALLOWED: Final = ("os.listdir", "os.scandir", "os.walk", "os.fspath")
_ROOM_BYTES: Final = 2 * 2**30
"""Address space for scoring, beside the imported libraries, which reserve more of it on a machine with more cores."""


def main() -> None:
    """Answer requests until the input ends."""
    answers = reserve_stdout()
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # a parent that ignores a signal passes that on
    logging.disable(logging.CRITICAL)
    from turnwise_reasoning_gym import data_sets

    reserve_stderr()

    def write(answer: JsonDict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    if sys.argv[1] == "score":
        _score_all(write, float(sys.argv[2]))
        return
    for line in sys.stdin:
        try:
            mixture = data_sets.Mixture.read(**json.loads(line))
            if sys.argv[1] == "describe":
                write({"line": mixture.describe()})
                continue
            for row in mixture.rows():
                write(row)
            write({})
        except DataError as error:
            write({"error": str(error)})


def _score_all(write: Callable[[JsonDict], None], timeout_s: float) -> None:
    from turnwise_reasoning_gym import data_sets

    guarded = False
    for line in sys.stdin:
        request = json.loads(line)
        data_sets.prepare(request)  # it reads files of the package, and needs its time once
        if not guarded:
            _guard()
            guarded = True
        # Of the processor, because a busy machine does not make an answer wrong; and of the clock, because an answer
        # that waits takes no processor.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_FACTOR * timeout_s)
        value = data_sets.score(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write({"score": value})


def _guard() -> None:
    """Refuse what no scoring needs, and what a text that is evaluated could do by accident."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # pipes have no size
    with contextlib.suppress(OSError, ValueError):  # a system without this file or limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + _ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.addaudithook(_refuse)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(_REFUSED) and event not in _ALLOWED:
        raise PermissionError(event)


if __name__ == "__main__":
    main()
