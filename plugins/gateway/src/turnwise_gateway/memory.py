"""Gives memory back to the system after the work of long requests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_and_give_back(work: Callable[[], T]) -> T:
    """
    Return the result of some work in a thread, after the C library has given back the memory that it has no use for.

    It keeps an arena of memory for each thread otherwise, which grew by some MiB with each long request.
    """
    try:
        return work()
    finally:
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
            trim(0)  # some milliseconds, without the lock of the interpreter
