"""The collector of objects that refer to each other in a circle."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_GROWTH: Final = 1.25
_YOUNG: Final = 3
"""Collections of the youngest objects before one of the middle generation; Python has 10."""
_STATM: Final = Path("/proc/self/statm")
_NEVER: Final = 2**31 - 1
"""As a threshold: more collections than a process ever has."""


def read_memory() -> int:
    """
    Return the resident memory of this process, in a unit of the system.

    Systems without `/proc` give the largest so far. On Linux this would be too much: a new program begins with the
    largest memory of its parent.
    """
    try:
        return int(_STATM.read_bytes().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def freeze_start() -> None:
    """
    Let garbage collections visit no object that exists now.

    A process that is the program's own calls it once, when its start is over. With torch and transformers some 350,000
    objects live as long as the process. A full collection visits them all: it takes 150 to 220 ms, and meanwhile no
    episode of the process continues, and no call is answered. Only commands and actors call this: a user's own script
    has its own settings of the collector.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def full_collections_on_growth(read_memory: Callable[[], int] = read_memory) -> Iterator[None]:
    """
    Let full garbage collections happen only when the process has grown by a quarter since the last one.

    Python's own rule counts the objects that live on. When many sessions open, it visits the objects of all of them,
    and all calls wait meanwhile (docs/explanation/sessions.md has the times). It has little to free, because reference
    counts free closed sessions. Where the code of an agent makes circles, memory grows, and Python's rule holds until
    its next full collection. So such garbage cannot grow without end. `gc.collect()` works as ever. The middle
    generation is collected more often, so that each time has fewer objects to visit.

    The memory is the host's. So replicas and trainers keep Python's rule: their circles could hold tensors on a GPU.
    """
    thresholds = gc.get_threshold()
    if thresholds[2] == _NEVER:  # a run that overlaps with this one has set these thresholds, and resets them
        yield
        return
    memory = 0

    def wait_for_growth() -> None:
        nonlocal memory
        memory = read_memory()
        gc.set_threshold(thresholds[0], _YOUNG, _NEVER)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            wait_for_growth()
        elif phase == "stop" and info["generation"] == 1 and read_memory() > _GROWTH * memory:
            gc.set_threshold(*thresholds)

    wait_for_growth()
    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
