"""The number of files, pipes and connections that a process may have open."""

from __future__ import annotations

import resource
from typing import Final

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
