"""The number of files that a process may have open, and the standard streams of a process that answers requests."""

from __future__ import annotations

import os
import resource
import sys
from typing import IO, Final

MOST: Final = 1 << 16
"""Enough for any run; some programs walk over all descriptors that they may have, so children should not get more."""
EACH_EPISODE: Final = 6
"""Of an agent that runs as a program: two pipes of output, one that ends it, its handle, and two connections."""
SPARE: Final = 256
"""Of everything else: files, the engine, Ray."""


def raise_descriptor_limit() -> int:
    """
    Raise the limit of this process as far as it may, and return it.

    A shell gives its programs 1,024 descriptors in most systems, and lets them raise it to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MOST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS has a lower limit than the one that it names
        return soft
    return most


def count_needed(num_episodes: int) -> int:
    """Return the descriptors of a worker that runs this number of agents as programs at once."""
    return SPARE + EACH_EPISODE * num_episodes


def count_fitting(num_descriptors: int) -> int:
    """Return how many agents may run as programs at once in a worker with this number of descriptors; at least one."""
    return max(1, (num_descriptors - SPARE) // EACH_EPISODE)


def reserve_stdout() -> IO[str]:
    """Return standard output for the answers of this process only, and discard the output of libraries."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answers


def reserve_stderr() -> None:
    """
    Discard standard error, except for one line with the exception that ends this process.

    The parent reads standard error when this process has ended, so a library that writes much would fill the pipe and
    block.
    """
    errors = os.dup(sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def report(kind: type[BaseException], error: BaseException, _trace: object) -> None:
        os.write(errors, f"{kind.__name__}: {' '.join(str(error).split())}\n".encode(errors="replace"))

    sys.excepthook = report
