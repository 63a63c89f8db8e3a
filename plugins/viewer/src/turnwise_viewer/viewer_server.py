"""The server of the page and its API: on loopback, at a random port, below a token that only the URL has."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from types import TracebackType
from typing import Final

import structlog
from aiohttp import web

from turnwise.errors import describe
from turnwise_viewer.page_address import PageAddress
from turnwise_viewer.routes import Routes, json_response
from turnwise_viewer.run_folder import RunFolder

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: the page runs its own script and nothing that a model wrote."""

_HOST: Final = "127.0.0.1"
_NAMES: Final = frozenset({"127.0.0.1", "localhost"})
_STATIC: Final = {"": "index.html", "app.js": "app.js", "app.css": "app.css", "icon.svg": "icon.svg"}
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}

_ACCEPT_PASSES: Final = 8
"""Passes of the event loop from an accepted connection to its handler; asyncio needs three."""


class ViewerServer:
    """
    Serves some runs. An async context manager.

    Args:
        runs: opened runs; they stay open.
        port: 0 takes a free one.
        token: of the URL; a new one by default.
    """

    def __init__(self, runs: Sequence[RunFolder], port: int = 0, token: str = "") -> None:
        self._token = token or secrets.token_urlsafe(24)
        self._wanted_port = port
        self._port = 0
        self._listener: socket.socket | None = None
        app = web.Application(middlewares=[self._guard])
        pages = web.Application()
        routes = Routes(runs)
        pages.add_routes(routes.list())
        app.on_response_prepare.append(_add_headers)
        app.on_shutdown.append(routes.events.stop)
        pages.add_routes([web.get(f"/{name}", _static(file)) for name, file in _STATIC.items()])
        app.add_subapp(f"/{self._token}", pages)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    @property
    def address(self) -> PageAddress:
        """Port and token of the page."""
        return PageAddress(self._port, self._token)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{_HOST}:{self._port}/{self._token}/"

    async def start(self) -> None:
        """Listen; `OSError` if the port is taken."""
        await self._runner.setup()
        self._listener = socket.create_server((_HOST, self._wanted_port))
        await web.SockSite(self._runner, self._listener).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            # A connection that was just accepted gets its handler some passes later. asyncio drops it without closing
            # it if its server is closed between, so the server stops to accept first.
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(_ACCEPT_PASSES):
            await asyncio.sleep(0)
        await self._runner.cleanup()

    async def __aenter__(self) -> ViewerServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse other names of this machine, which another site may have given it, and requests without the token."""
        name = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
        given = request.path.split("/")[1] if "/" in request.path else ""
        if name not in _NAMES:
            response: web.StreamResponse = json_response({"error": "unknown host name"}, 403)
        elif not hmac.compare_digest(given.encode(), self._token.encode()):
            response = json_response({"error": "the token of the URL is missing or wrong"}, 404)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = json_response({"error": error.reason}, error.status)
            except Exception as error:  # noqa: BLE001 - a browser gets one line; the log gets the frames
                structlog.get_logger().exception("a request failed", path=request.path.partition("/api")[2])
                response = json_response({"error": f"the viewer failed: {describe(error)}"}, 500)
        return response


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _static(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    file = files("turnwise_viewer") / "static" / name

    async def serve(_request: web.Request) -> web.Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=file.read_bytes(), content_type=kind, charset="utf-8")

    return serve
