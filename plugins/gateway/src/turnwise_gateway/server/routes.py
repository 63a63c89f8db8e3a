"""The routes of the agents' port."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import frozen

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import DIALECTS, Dialect

Action = Literal["call", "count", "models", "tools"]

_PATH: Final = re.compile(r"(?:/s/([A-Za-z0-9_-]{1,64}))?/(mcp|v1/[a-z_/]+)\Z")
_BASE: Final = re.compile(r"(?:/s/[A-Za-z0-9_-]{1,64})?(?:/v1)?/?\Z")


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


def _list_actions() -> Iterator[tuple[tuple[str, str], tuple[Action, Dialect]]]:
    yield ("GET", "v1/models"), ("models", DIALECTS[0])
    yield ("POST", "mcp"), ("tools", DIALECTS[0])
    for each in DIALECTS:
        yield ("POST", each.path), ("call", each)
        if each.count_path is not None:
            yield ("POST", each.count_path), ("count", each)


_ACTIONS: Final = dict(_list_actions())


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
    named = [each for each in DIALECTS if each.header is not None and each.header in headers]
    asked = [each for each in DIALECTS if each.is_asked_by(path)]
    return next(iter(named + asked), DIALECTS[0])
