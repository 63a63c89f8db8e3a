"""Translation between the three dialects of model APIs and one form of calls; pure, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise_gateway.calls import Dialect
from turnwise_gateway.dialects.chat import read_chat
from turnwise_gateway.dialects.errors import describe_error, headers_of, status_of
from turnwise_gateway.dialects.exchange import Exchange, Received
from turnwise_gateway.dialects.messages import read_messages
from turnwise_gateway.dialects.responses import read_responses
from turnwise_gateway.dialects.strict_json import write_json

__all__ = [
    "Exchange",
    "describe_error",
    "headers_of",
    "read_count",
    "read_exchange",
    "status_of",
    "write_json",
]


def read_exchange(dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> Exchange:
    """
    Return the call in a request.

    Args:
        dialect: of the request.
        body: JSON in UTF-8.
        headers: of the request; those with keys are left out of the call.

    Raises:
        CallRefusedError: the body is no strict JSON, or a field is wrong or not supported.
    """
    received = Received.read(body, headers)
    if dialect == "chat":
        return read_chat(received)
    return read_messages(received) if dialect == "messages" else read_responses(received)


def read_count(body: bytes, headers: Mapping[str, str]) -> Exchange:
    """Return the call of a request for a number of tokens, which is in the dialect Messages; errors as above."""
    return read_messages(Received.read(body, headers), counts=True)
