"""
Errors in the words of each dialect.

A refusal has a status that ends every client at its first call, since clients repeat calls that end with 408, 409, 429
or 5xx; only overload and failures of an engine or another server have one of those.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError

MAX_RETRY_AFTER_S: Final = 120
"""Clients ignore a longer wait and try again at once."""


@frozen
class _Words:
    status: int
    openai_type: str
    code: str | None
    messages_type: str


_INVALID: Final = "invalid_request_error"
_WORDS: Final = {
    "session_closed": _Words(400, _INVALID, "session_closed", _INVALID),
    "budget_exhausted": _Words(400, _INVALID, "budget_exhausted", _INVALID),
    "context_length_exceeded": _Words(400, _INVALID, "context_length_exceeded", _INVALID),
    "unsupported": _Words(400, _INVALID, "unsupported_parameter", _INVALID),
    "grammar": _Words(400, _INVALID, "unsupported_parameter", _INVALID),
    "invalid": _Words(400, _INVALID, "invalid_value", _INVALID),
    "unknown_host": _Words(400, _INVALID, "unknown_host", _INVALID),
    "unauthorized": _Words(401, "authentication_error", "invalid_api_key", "authentication_error"),
    "foreign_caller": _Words(403, "permission_error", "foreign_caller", "permission_error"),
    "not_found": _Words(404, _INVALID, "not_found", "not_found_error"),
    "not_allowed": _Words(405, _INVALID, "method_not_allowed", _INVALID),
    "timeout": _Words(408, _INVALID, "request_timeout", _INVALID),
    "too_large": _Words(413, _INVALID, "request_too_large", "request_too_large"),
    "encoded": _Words(415, _INVALID, "unsupported_encoding", _INVALID),
    "overloaded": _Words(429, "rate_limit_error", "overloaded", "rate_limit_error"),
    "endpoint": _Words(502, "server_error", "endpoint_failed", "api_error"),
    "engine": _Words(500, "server_error", "server_error", "api_error"),
}


def status_of(error: CallRefusedError) -> int:
    """Return the HTTP status of an error."""
    return _WORDS[error.kind].status


def headers_of(error: CallRefusedError) -> dict[str, str]:
    """Return the headers that tell clients whether and when to call again."""
    if error.kind == "overloaded":
        return {"retry-after": str(min(max(error.retry_after_s, 1), MAX_RETRY_AFTER_S))}
    if error.kind == "not_allowed":
        return {"Allow": "POST", "x-should-retry": "false"}
    return {} if error.kind in {"endpoint", "engine"} else {"x-should-retry": "false"}


def code_of(error: CallRefusedError) -> str | None:
    """Return the code of an error in Chat Completions and Responses."""
    return _WORDS[error.kind].code


def describe_openai_error(error: CallRefusedError) -> JsonDict:
    """Return the body of an error response of OpenAI's APIs; the error of a stream in chat has the same form."""
    words = _WORDS[error.kind]
    return {"error": {"message": error.message, "type": words.openai_type, "param": error.param, "code": words.code}}


def describe_messages_error(error: CallRefusedError) -> JsonDict:
    """Return the body of an error response of Messages; the error of a stream has the same form."""
    message = _message_in_messages(error)
    return {"type": "error", "error": {"type": _WORDS[error.kind].messages_type, "message": message}}


def _message_in_messages(error: CallRefusedError) -> str:
    # This dialect has no codes: clients compact when they read these words, and users find the kind in the text.
    if error.kind == "context_length_exceeded":
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    if error.kind in {"session_closed", "budget_exhausted"}:
        return f"{error.kind}: {error.message}"
    return error.message
