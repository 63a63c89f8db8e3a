"""
Translation between the dialects of model APIs and one form of calls; pure, without HTTP.

A dialect is one object in `DIALECTS`. A new one is a file with its `Dialect` and an entry in the tuple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from turnwise_gateway.dialects.chat import CHAT
from turnwise_gateway.dialects.dialect import Dialect
from turnwise_gateway.dialects.errors import headers_of, status_of
from turnwise_gateway.dialects.exchange import Exchange, Received, keep_headers
from turnwise_gateway.dialects.messages import MESSAGES
from turnwise_gateway.dialects.request_body import RequestMemory
from turnwise_gateway.dialects.responses import RESPONSES
from turnwise_gateway.dialects.strict_json import write_json

__all__ = [
    "DIALECTS",
    "Dialect",
    "Exchange",
    "RequestMemory",
    "find_dialect",
    "headers_of",
    "keep_headers",
    "read_exchange",
    "status_of",
    "write_json",
]

DIALECTS: Final[tuple[Dialect, ...]] = (CHAT, MESSAGES, RESPONSES)
"""The first one has the words for requests of no dialect."""
_BY_NAME: Final = {each.name: each for each in DIALECTS}


def find_dialect(name: str) -> Dialect:
    """Return the dialect of a name; `KeyError` if there is none."""
    return _BY_NAME[name]


def read_exchange(
    dialect: Dialect,
    body: bytes,
    headers: Mapping[str, str],
    memory: RequestMemory | None = None,
    *,
    is_question: bool = False,
) -> Exchange:
    """
    Return the call in a request.

    Args:
        dialect: of the request.
        body: JSON in UTF-8.
        headers: of the request; those with keys are left out of the call.
        memory: of the session: the part that earlier bodies have as well is not read again.
        is_question: the request is about a call, and asks for no reply of the model.

    Raises:
        CallRefusedError: the body is no strict JSON, a field is wrong or not supported, or the limits of the session
            allow no such body.
    """
    memory = RequestMemory() if memory is None else memory
    parsed = memory.read(dialect.name, dialect.list_key, body)
    exchange = dialect.read(Received.of(parsed, headers, body, memory, is_question=is_question))
    if memory.limits is not None:
        memory.limits.check_items(len(exchange.call.messages) + len(exchange.call.tools))
    memory.keep(parsed)  # only now, for a body that is refused is not read to its end
    return exchange
