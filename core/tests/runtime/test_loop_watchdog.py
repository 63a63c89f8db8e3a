"""The thread that watches the event loop lives as long as the run, for all limits."""

import asyncio
import threading

import pytest

from turnwise.options import Deadlines
from turnwise.runtime.loop_watchdog import EventLoopWatchdog


@pytest.mark.parametrize("limit_s", [1e-300, 1e-9, 1.0, 4 * threading.TIMEOUT_MAX, 1e10, 1e300, 1.7e308])
def test_the_watch_ends_with_the_run_and_not_before(limit_s, monkeypatch):
    """No limit that the config accepts ends the thread with an error."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    async def run():
        with EventLoopWatchdog(Deadlines(loop_lag_s=limit_s).loop_lag_s) as watchdog:
            await asyncio.sleep(0)
        watchdog._thread.join(60)
        assert not watchdog._thread.is_alive()

    asyncio.run(run())

    assert not errors
