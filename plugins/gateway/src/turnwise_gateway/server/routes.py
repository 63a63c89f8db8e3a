"""The routes of the agents' port."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal
from urllib.parse import unquote

from attrs import evolve, frozen

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import DIALECTS, Dialect
from turnwise_gateway.dialects.dialect import Question

Action = Literal["call", "question", "models", "tools"]

_PATH: Final = re.compile(r"(?:/s/([A-Za-z0-9_-]{1,64}))?/(mcp|v1/[a-z_/]+)\Z")
_MODEL: Final = re.compile(r"((?:/s/[A-Za-z0-9_-]{1,64})?/v1/models)/([^?#]+)\Z")
_ROOT: Final = re.compile(r"(?:/s/[A-Za-z0-9_-]{1,64})?(?=/|\Z)")
_MAX_SHOWN: Final = 200
_BASE: Final = re.compile(r"(?:/s/[A-Za-z0-9_-]{1,64})?(?:/v1)?/?\Z")


@frozen
class Route:
    """
    The target of a request.

    Attributes:
        action: to do.
        dialect: of the request and its response; for tools, of errors outside their protocol.
        session_id: in the path; None leaves it to the key.
        question: answers the request, if it is about a call.
        model: name in the path, decoded; None for the list of models.
    """

    action: Action
    dialect: Dialect
    session_id: str | None = None
    question: Question | None = None
    model: str | None = None


def _list_routes() -> Iterator[tuple[tuple[str, str], Route]]:
    yield ("GET", "v1/models"), Route("models", DIALECTS[0])
    yield ("POST", "mcp"), Route("tools", DIALECTS[0])
    for each in DIALECTS:
        yield ("POST", each.path), Route("call", each)
        for path, question in each.questions.items():
            yield ("POST", path), Route("question", each, question=question)


_ROUTES: Final = dict(_list_routes())


def find_route(method: str, path: str, origin: str) -> Route:
    """
    Return the route of a request; `CallRefusedError` if there is none, with the base URLs of clients.

    Args:
        method: of the request.
        path: not decoded, without its query.
        origin: scheme, host and port by which the client reaches the server.
    """
    if method == "GET" and (named := _MODEL.match(path)):
        return evolve(find_route(method, named[1], origin), model=unquote(named[2]))
    found = _PATH.match(path)
    route = _ROUTES.get((method, found[2])) if found else None
    if found is not None and found[2] == "mcp" and route is None:
        # Clients ask with GET for a stream of the server's own messages, and take only this status for a no.
        raise CallRefusedError("not_allowed", "the tools are served to POST alone")
    if found is None or route is None:
        root = _ROOT.match(path)
        base, shown = f"{origin}{root[0] if root else ''}", path[:_MAX_SHOWN].encode("ascii", "replace").decode()
        raise CallRefusedError(
            "not_found",
            f"there is no route {method} {shown}: the base URL is {base}/v1 for clients of OpenAI's APIs, "
            f"and {base} for those of Anthropic's",
        )
    return evolve(route, session_id=found[1])


def is_base(method: str, path: str) -> bool:
    """Return whether a request only asks whether there is a server at the base URL."""
    return method in {"GET", "HEAD"} and _BASE.match(path) is not None


def guess_dialect(path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect of an error for a request that may have no route."""
    named = [each for each in DIALECTS if each.header is not None and each.header in headers]
    asked = [each for each in DIALECTS if each.is_asked_by(path)]
    return next(iter(named + asked), DIALECTS[0])
