"""An event loop in virtual time, for tests of code that waits for seconds; the simulation has one for threads too."""

from __future__ import annotations

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when no task is ready."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # asyncio has no public way to its timers
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]  # as above
        super()._run_once()  # type: ignore[misc]  # as above
