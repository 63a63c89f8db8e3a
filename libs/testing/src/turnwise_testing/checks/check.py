"""
Checks of conformance suites: functions of a probe, each with its promise, run within a time limit.

The first paragraph of a check's docstring is its promise. A check raises `AssertionError` when the promise is broken,
and may return a text: the reason why it does not apply.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")
Check = Callable[[Any], "str | Coroutine[Any, Any, str | None] | None"]
"""A sync or async function of a probe."""

CHECK_TIMEOUT_S: Final = 60.0
"""Longest time of one check, unless a suite or `turnwise check` sets another."""
_THREADS: Final = ("turnwise check", "turnwise tool")
"""Names of the threads that run code of a plugin."""
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), __file__.removesuffix("checks.py"), "<")


def register(checks: dict[str, Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that adds a function to a table, under its name without `check_`."""

    def add(function: Callable[..., T]) -> Callable[..., T]:
        checks[getattr(function, "__name__", "").removeprefix("check_")] = function
        return function

    return add


def promise_of(check: object) -> str:
    """Return the first paragraph of a check's docstring, as one line."""
    return " ".join((inspect.getdoc(check) or "").split("\n\n")[0].split())


def run_check(check: Check, probe: object, timeout_s: float = CHECK_TIMEOUT_S) -> str | None:
    """Run a sync or async check on a probe; see `run_within`."""

    def run() -> str | None:
        outcome = check(probe)
        return asyncio.run(outcome) if isinstance(outcome, Coroutine) else outcome

    try:
        return run_within(run, promise_of(check), timeout_s)
    except ExceptionGroup as group:
        # pytest and the command line show the first text, and a group has no useful text.
        raise _first(group) from group


def run_within(call: Callable[[], T], promise: str, timeout_s: float = CHECK_TIMEOUT_S) -> T:
    """
    Call a function in a new thread and return its result; raise its exception.

    Raises:
        AssertionError: it takes longer than `timeout_s` seconds. The text has the promise and the place that waits. The
            thread is left behind, because Python cannot stop it. On Linux, seconds in which its thread could run but no
            core was free do not count: a check that computes must not fail because the machine does something else.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread; pytest's skip is no Exception
            outcome.set_exception(error)

    left_behind = _waiting_places()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="turnwise check", daemon=True)
    thread.start()
    started = time.monotonic()
    while thread.is_alive() and (left_s := timeout_s + _queued_s(thread) - (time.monotonic() - started)) > 0:
        thread.join(left_s)
    if thread.is_alive():
        # Threads of earlier checks may still wait at the places that were seen before.
        places = [place for ident, place in _waiting_places().items() if place != left_behind.get(ident)]
        text = f", and {places[0]} still waits" if places else ""
        raise AssertionError(f"nothing came within {timeout_s:g} s{text}; the promise: {promise}")
    return outcome.result()


def _queued_s(thread: threading.Thread) -> float:
    """Return the seconds that a thread has waited for a core; 0 where the system does not count them."""
    try:
        # Nanoseconds on a core, nanoseconds in the queue for one, and turns: Documentation/scheduler/sched-stats.rst.
        counts = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()
    except OSError:
        return 0.0
    return int(counts[1]) / 1e9 if len(counts) > 1 else 0.0


def _waiting_places() -> dict[int, str]:
    """Return the plugin's line in which each thread of a check waits, by thread."""
    names = {each.ident: each.name for each in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to see another thread
    ours = {ident: _own_line(frame) for ident, frame in frames.items() if names.get(ident) in _THREADS}
    return {ident: place for ident, place in ours.items() if place}


def _own_line(frame: FrameType) -> str:
    """Return the innermost line that is neither Python's, nor turnwise's, nor this kit's."""
    for each in reversed(traceback.extract_stack(frame)):
        if not each.filename.startswith(_LIBRARIES) and "/turnwise/" not in each.filename:
            return f"{each.filename}:{each.lineno} in {each.name}"
    return ""


def _first(group: ExceptionGroup[Exception]) -> Exception:
    first: Exception = group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first
