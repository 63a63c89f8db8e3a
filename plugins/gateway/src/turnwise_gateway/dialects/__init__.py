"""Translation between the three dialects of model APIs and one form of calls; pure, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from turnwise_gateway.calls import Dialect
from turnwise_gateway.dialects.chat import read_chat
from turnwise_gateway.dialects.errors import describe_error, headers_of, status_of
from turnwise_gateway.dialects.exchange import Exchange, Received
from turnwise_gateway.dialects.messages import read_messages
from turnwise_gateway.dialects.request_body import RequestMemory
from turnwise_gateway.dialects.responses import read_responses
from turnwise_gateway.dialects.strict_json import write_json

__all__ = [
    "Exchange",
    "RequestMemory",
    "describe_error",
    "headers_of",
    "read_count",
    "read_exchange",
    "status_of",
    "write_json",
]


def read_exchange(
    dialect: Dialect, body: bytes, headers: Mapping[str, str], memory: RequestMemory | None = None
) -> Exchange:
    """
    Return the call in a request.

    Args:
        dialect: of the request.
        body: JSON in UTF-8.
        headers: of the request; those with keys are left out of the call.
        memory: of the session: the part that earlier bodies have as well is not read again.

    Raises:
        CallRefusedError: the body is no strict JSON, a field is wrong or not supported, or the limits of the session
            allow no such body.
    """
    readers: Mapping[Dialect, Callable[[Received], Exchange]] = {
        "chat": read_chat,
        "messages": read_messages,
        "responses": read_responses,
    }
    return _read(readers[dialect], dialect, body, headers, memory)


def read_count(body: bytes, headers: Mapping[str, str], memory: RequestMemory | None = None) -> Exchange:
    """Return the call of a request for a number of tokens, which is in the dialect Messages; errors as above."""
    return _read(partial(read_messages, counts=True), "messages", body, headers, memory)


def _read(
    reader: Callable[[Received], Exchange],
    dialect: Dialect,
    body: bytes,
    headers: Mapping[str, str],
    memory: RequestMemory | None,
) -> Exchange:
    memory = RequestMemory() if memory is None else memory
    parsed = memory.read(dialect, body)
    exchange = reader(Received.of(parsed, headers, body))
    if memory.limits is not None:
        memory.limits.check_items(len(exchange.call.messages) + len(exchange.call.tools))
    memory.keep(parsed)  # only now, for a body that is refused is not read to its end
    return exchange
