"""The logger of the gateway's servers: it logs no text of malformed requests, and no error again and again."""

from __future__ import annotations

import logging
import resource
import time
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

_ACCEPT_S: Final = 60.0


class _SayOnce(logging.Filter):
    """Leaves one line in a minute of the errors of asyncio that no descriptor is free for a new connection."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if "socket.accept() out of system resource" not in str(record.msg):
            return True
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _ACCEPT_S
        record.exc_info, record.args = None, (resource.getrlimit(resource.RLIMIT_NOFILE)[0],)
        record.msg = "all %d descriptors of this process are in use, so new connections wait; raise `ulimit -n`"
        return True


class _Shorten(logging.Filter):
    """Removes the error of a malformed request: it quotes the head, which has the key of the sender."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.msg, record.args = "a malformed request was refused: %s", (type(error).__name__,)
        return True


SERVER_LOGGER: Final = logging.getLogger("turnwise_gateway.server")
"""For the option `logger` of the servers of aiohttp."""
SERVER_LOGGER.addFilter(_Shorten())
logging.getLogger("asyncio").addFilter(_SayOnce())
