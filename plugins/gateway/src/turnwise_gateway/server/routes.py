"""The routes of the agents' port."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from attrs import frozen

from turnwise_gateway.calls import CallRefusedError, Dialect

Action = Literal["call", "count", "models", "tools"]

_PATH: Final = re.compile(r"(?:/s/([A-Za-z0-9_-]{1,64}))?/(mcp|v1/[a-z_/]+)\Z")
_BASE: Final = re.compile(r"(?:/s/[A-Za-z0-9_-]{1,64})?(?:/v1)?/?\Z")
_ACTIONS: Final[Mapping[tuple[str, str], tuple[Action, Dialect]]] = {
    ("POST", "v1/chat/completions"): ("call", "chat"),
    ("POST", "v1/messages"): ("call", "messages"),
    ("POST", "v1/messages/count_tokens"): ("count", "messages"),
    ("POST", "v1/responses"): ("call", "responses"),
    ("GET", "v1/models"): ("models", "chat"),
    ("POST", "mcp"): ("tools", "chat"),
}


@frozen
class Route:
    """
    The target of a request.

    Attributes:
        action: to do.
        dialect: of the request and its response; for tools, of errors outside their protocol.
        session_id: in the path; None leaves it to the key.
    """

    action: Action
    dialect: Dialect
    session_id: str | None


def find_route(method: str, path: str) -> Route:
    """Return the route of an undecoded path without its query; `CallRefusedError` if there is none."""
    found = _PATH.match(path)
    entry = _ACTIONS.get((method, found[2])) if found else None
    if found is not None and found[2] == "mcp" and entry is None:
        # Clients ask with GET for a stream of the server's own messages, and take only this status for a no.
        raise CallRefusedError("not_allowed", "the tools are served to POST alone")
    if found is None or entry is None:
        raise CallRefusedError("not_found", "there is no such route")
    return Route(*entry, found[1])


def is_base(method: str, path: str) -> bool:
    """Return whether a request only asks whether there is a server at the base URL."""
    return method in {"GET", "HEAD"} and _BASE.match(path) is not None


def guess_dialect(path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect of an error for a request that may have no route."""
    if "/messages" in path or "anthropic-version" in headers:
        return "messages"
    return "responses" if path.endswith("/responses") else "chat"
