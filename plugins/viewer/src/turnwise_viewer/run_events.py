"""
Tells open pages when the files of a run change, by server-sent events.

The events come from the run's folder and not from an observer in the run. The process that starts a run writes its
folder, also on Ray and in a training. The folder outlives a killed process, and a viewer that starts later finds all
that was written before. The viewer looks at the files twice a second, because network file systems report no changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

from turnwise.types import JsonDict
from turnwise_viewer.plain_json import encode

_LOOK_S: Final = 0.5
"""Time between two looks at the files. A run writes its episodes once a second."""
_QUIET_S: Final = 15.0
"""A connection without a change says something after this time, so that either side notices when the other is gone."""
_RETRY_MS: Final = 1000


class RunEvents:
    """
    A stream of events for each page: `runs`, with the answer of the route `runs`, at the start and after each change.

    Args:
        describe: returns the answer; called in a thread.
    """

    def __init__(self, describe: Callable[[], JsonDict]) -> None:
        self._describe = describe
        self._stopped = asyncio.Event()

    async def stop(self, _app: web.Application) -> None:
        """End all streams."""
        self._stopped.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with events until the page leaves or the server stops."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the page is gone
            await response.write(f"retry: {_RETRY_MS}\n\n".encode())
            await self._send_changes(request, response)
        return response

    async def _send_changes(self, request: web.Request, response: web.StreamResponse) -> None:
        sent, sent_at = b"", time.monotonic()
        while not self._stopped.is_set() and request.transport is not None and not request.transport.is_closing():
            text = encode(await asyncio.to_thread(self._describe))
            if text != sent:
                await response.write(b"event: runs\ndata: " + text + b"\n\n")
                sent, sent_at = text, time.monotonic()
            elif time.monotonic() - sent_at > _QUIET_S:
                await response.write(b": no change\n\n")
                sent_at = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _LOOK_S)
