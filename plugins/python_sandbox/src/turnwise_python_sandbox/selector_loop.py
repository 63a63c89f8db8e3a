"""An event loop for one thread: callbacks for readable files, and actions that other threads post."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_DRAIN_BYTES: Final = 4096


class SelectorLoop:
    """
    Runs callbacks on the thread that calls `run_once`.

    `post` may be called on any thread; everything else belongs to the thread of the loop.
    """

    def __init__(self) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._finished = False
        self._lock = threading.Lock()
        """Keeps an action from being added to a queue that nothing will read."""
        self._selector = selectors.DefaultSelector()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        for each in (self._wakeup_receiver, self._wakeup_sender):
            each.setblocking(False)
        self.register(self._wakeup_receiver, self._drain_wakeups)

    def post(self, action: Callable[[], None]) -> bool:
        """Run an action on the thread of the loop; return False if the loop has finished, so that it will not run."""
        with self._lock:
            if self._finished:
                return False
            # Append first: the loop drains the wakeups before it runs the actions, so that it misses no action.
            self._actions.append(action)
        # A full socket means that the loop is about to wake up anyway; a closed one, that it is in `finish`.
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"x")
        return True

    def register(self, file: socket.socket | int, callback: Callable[[], None]) -> None:
        """Call back whenever a file is readable."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def unregister(self, file: socket.socket | int) -> None:
        """Stop the callbacks of a file; raise `KeyError` if it has none."""
        self._selector.unregister(file)

    def run_once(self, timeout_s: float | None) -> None:
        """Wait for a readable file or an action, then run the callbacks and all posted actions."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        while self._actions:
            self._actions.popleft()()

    def finish(self) -> None:
        """Accept no further action, and run the remaining ones."""
        with self._lock:
            self._finished = True
        while self._actions:
            self._actions.popleft()()

    def close(self) -> None:
        """Close the files of the loop; does not close registered files."""
        self._selector.close()
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup_receiver.recv(_DRAIN_BYTES):
                pass
