"""The routes of every control port: they list, show, score, fail and end sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import web
from attrs import frozen

from turnwise.errors import Owner
from turnwise.types import JsonDict
from turnwise_gateway.control.control_server import build_app, json_reply, read_body, read_failure, run_to_end, tell
from turnwise_gateway.control.scores import ControlError, Verdict
from turnwise_gateway.server.options import ServerOptions


class ControlledSessions(Protocol):
    """
    The sessions of a control port.

    `show` and `end` raise a `RequestError` for an unknown session, and `score` for an unknown turn or record.
    """

    def find_key(self, session_id: str) -> str | None:
        """Return the key that opens the routes of a session beside the secret of the port; None for no key."""

    async def list(self) -> JsonDict:
        """Return counts under `stats`, and a line about each session under `sessions`."""

    async def show(self, session_id: str, form: str) -> JsonDict:
        """Return a session in the form `json` or `atif`."""

    async def score(self, session_id: str, body: dict[str, Any]) -> Verdict:
        """Note a score; one of the whole session ends it."""

    async def fail(self, session_id: str, owner: Owner, reason: str) -> Verdict:
        """End a session as failed."""

    async def end(self, session_id: str) -> JsonDict:
        """End a session with the scores that it has; return it as JSON. One that is over stays as it is."""


def build_control_app(
    sessions: ControlledSessions, secret: str, options: ServerOptions, more: Sequence[web.RouteDef]
) -> web.Application:
    """
    Return the application of a control port.

    Args:
        sessions: of the port.
        secret: bearer token of every request, at least 16 characters; the control key of a session opens the routes
            of that session as well.
        options: names by which requests may address the server.
        more: other routes, which open sessions.

    Raises:
        ConfigError: the secret is too short.
    """
    routes = _SessionRoutes(sessions)
    own = [
        web.get("/sessions", routes.list),
        web.get("/sessions/{id}", routes.show),
        web.delete("/sessions/{id}", routes.end),
        web.post("/sessions/{id}/score", routes.score),
        web.post("/sessions/{id}/fail", routes.fail),
    ]
    return build_app([*own, *more], secret, options, routes.find_key)


@frozen(eq=False)
class _SessionRoutes:
    sessions: ControlledSessions

    def find_key(self, request: web.Request) -> str | None:
        is_own = request.path.startswith("/sessions/")
        return self.sessions.find_key(request.match_info.get("id", "")) if is_own else None

    async def list(self, _request: web.Request) -> web.Response:
        return json_reply(200, await self.sessions.list())

    async def show(self, request: web.Request) -> web.Response:
        form = request.query.get("format", "json")
        if form not in ("json", "atif"):
            raise ControlError(f"'format' must be json or atif: {form!r}")
        return json_reply(200, await self.sessions.show(request.match_info["id"], form))

    async def score(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"id", "score", "record", "turn", "metrics"})
        return await tell(self.sessions.score(request.match_info["id"], body), "session")

    async def fail(self, request: web.Request) -> web.Response:
        reason, owner, _body = await read_failure(request)
        return await tell(self.sessions.fail(request.match_info["id"], owner, reason), "session")

    async def end(self, request: web.Request) -> web.Response:
        return json_reply(200, await run_to_end(self.sessions.end(request.match_info["id"])))
