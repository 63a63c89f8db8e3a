"""The logger of the gateway's servers, which logs no text of malformed requests."""

from __future__ import annotations

import logging
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError


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
