"""
Reports code that blocks the event loop. While the loop is blocked, no episode continues and no deadline fires.

A thread watches the loop. It cannot end the blocking call; a tool that may block has to run in a thread or a process.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Final, Self

import structlog

from turnwise.tools.session import ToolSession

_SHOWN_FRAMES: Final = 6
_QUIET_S: Final = 60.0
"""Seconds between log lines that name no tool."""


class EventLoopWatchdog:
    """Watches the running event loop; a context manager. It counts no block while the machine is overloaded."""

    def __init__(self, limit_s: float) -> None:
        """Report code that does not yield to the loop for `limit_s` seconds."""
        self.num_blocks = 0
        self._limit_s = limit_s
        self._reported_load = -_QUIET_S
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="turnwise loop watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()
        self._ended.set()

    def _beat(self) -> None:
        self._seen = time.monotonic()
        self._timer = self._loop.call_later(self._limit_s / 4, self._beat)

    def _watch(self) -> None:
        reported = 0.0
        pause_s = min(self._limit_s / 4, threading.TIMEOUT_MAX)
        while not self._ended.wait(pause_s):
            # Read without a lock: `_beat` replaces one float, and an old value only delays the report.
            seen = self._seen
            late_s = time.monotonic() - seen
            if late_s > self._limit_s and seen != reported:  # one report for each block, however long it lasts
                reported = seen
                self._report(late_s)

    def _report(self, late_s: float) -> None:
        frame = sys._current_frames().get(self._owner)  # noqa: SLF001 - the only way to another thread's stack
        tool, now = _tool_in(frame), time.monotonic()
        waits = frame is not None and frame.f_code.co_filename == selectors.__file__
        self.num_blocks += not waits
        if tool is None and now - self._reported_load < _QUIET_S:
            return  # the machine is overloaded, so every beat is late
        self._reported_load = self._reported_load if tool else now
        if waits:
            structlog.get_logger().warning(
                "the machine is overloaded: the event loop woke late", seconds=round(late_s, 2)
            )
            return
        stack = traceback.format_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []
        structlog.get_logger().warning(
            "the event loop is blocked: no other episode continues and no deadline fires",
            seconds=round(late_s, 2),
            tool=tool,
            stack="".join(stack).rstrip(),
        )


def _tool_in(frame: FrameType | None) -> str | None:
    while frame is not None:
        if frame.f_code is ToolSession.call.__code__:
            call = frame.f_locals.get("call")
            return str(call.name) if call is not None else None
        frame = frame.f_back
    return None
