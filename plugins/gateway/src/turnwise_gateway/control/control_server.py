"""Requests and responses of control ports, and the server of such a port."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Self, TypeVar

import structlog
from aiohttp import web

from turnwise.errors import ConfigError, Owner
from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.control.scores import ControlError, Verdict, check_metrics
from turnwise_gateway.dialects.strict_json import read_json, write_json
from turnwise_gateway.server.closing import close_runner
from turnwise_gateway.server.delivery import connection_of
from turnwise_gateway.server.listening import listen
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.receipt import AgentsServer

MAX_BODY_BYTES: Final = 1024 * 1024
_MAX_REASON: Final = 2000
_SHUTDOWN_S: Final = 1.0
_RECEIVE_S: Final = web.RequestKey("receive_s", float)
_REFUSED: Final = {
    Verdict.CONFLICT: (409, "another score or end was reported before"),
    Verdict.LATE: (409, "the {} has ended"),
    Verdict.UNKNOWN: (404, "there is no such {}"),
}
"""Status and text for news that have no effect."""

T = TypeVar("T")
_running: Final[set[asyncio.Task[Any]]] = set()  # an event loop keeps no task alive

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FindKey = Callable[[web.Request], str | None]


class RequestError(Exception):
    """A request that has no effect; becomes a response."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class ControlServer:
    """
    Serves a control port. An async context manager.

    Args:
        app: of `build_app`.
        options: addresses and limits; the same that the application has.
    """

    def __init__(self, app: web.Application, options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        self._runner = _ControlRunner(app, self._options)
        self._port = 0

    @property
    def url(self) -> str:
        """Address of the started server, such as `http://127.0.0.1:8000`."""
        host = self._options.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await listen(self._runner, self._options.host, self._options.port)
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await close_runner(self._runner)


class _ControlRunner(web.AppRunner):
    """Serves an application over connections with the limits of the agents' port."""

    __slots__ = ("_options",)

    def __init__(self, app: web.Application, options: ServerOptions) -> None:
        super().__init__(app, shutdown_timeout=_SHUTDOWN_S)
        self._options = options

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application
        app = self.app
        # An agent that hangs up while it waits takes no task: its handler is cancelled.
        return AgentsServer(app._handle, self._options, request_factory=app._make_request)  # noqa: SLF001 - as it does


def build_app(
    routes: list[web.RouteDef], secret: str, options: ServerOptions, find_key: FindKey | None = None
) -> web.Application:
    """
    Return an application whose requests need a secret, or the key that is found for them; its failures are JSON.

    Raises:
        ConfigError: the secret has fewer than 16 characters.
    """
    if len(secret) < 16:
        raise ConfigError("the secret of the control port needs at least 16 characters")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = connection_of(request)
        connection.begin_request()
        try:
            options.check_host(request.headers.getall("Host", []))
            _check_token(request, [secret, find_key(request) if find_key else None])
            connection.prove(options)
            request[_RECEIVE_S] = options.receive_s
            return await handler(request)
        except RequestError as error:
            return error_reply(error.status, error.code, error.message)
        except (CallRefusedError, ControlError) as error:
            return error_reply(400, "invalid", str(error))
        except web.HTTPException as error:
            return error_reply(error.status, error.reason.lower().replace(" ", "_"), error.reason)
        except Exception as error:  # noqa: BLE001 - a client gets JSON, and no text of ours
            structlog.get_logger().exception("a control request failed", error=str(error))
            return error_reply(500, "failed", "the server failed")
        finally:
            connection.end_request()

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
    app.add_routes(routes)
    return app


def _check_token(request: web.Request, tokens: list[str | None]) -> None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    right = [each for each in tokens if each is not None and hmac.compare_digest(given, each.encode())]
    if scheme.lower() != "bearer" or not right:
        raise RequestError(401, "unauthorized", "the bearer token is missing or wrong")


async def read_body(request: web.Request, fields: set[str]) -> dict[str, Any]:
    """Return the JSON object of a request; `ControlError` for an unknown field."""
    try:
        async with asyncio.timeout(request[_RECEIVE_S]):
            text = await request.read()
    except TimeoutError as error:
        raise RequestError(408, "timeout", f"the body did not come within {request[_RECEIVE_S]:g} s") from error
    body = read_json(text)
    if unknown := sorted(body.keys() - fields):
        raise ControlError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    return body


async def read_failure(request: web.Request, *more: str) -> tuple[str, Owner, dict[str, Any]]:
    """Return the reason and the owner of a failure that an agent reports, and the body, with `more` fields."""
    body = await read_body(request, {"reason", "owner", *more})
    reason, owner = body.get("reason", ""), body.get("owner", "agent")
    if not isinstance(reason, str) or owner not in ("agent", "infra"):
        raise ControlError("'reason' must be a text, and 'owner' agent or infra")
    return reason[:_MAX_REASON] or "the agent gave no reason", owner, body


def read_metrics(body: dict[str, Any]) -> dict[str, float]:
    """Return the field `metrics`; `ControlError` unless it is an object of numbers."""
    metrics = body.get("metrics")
    return {} if metrics is None else check_metrics(metrics)


async def tell(news: Coroutine[Any, Any, Verdict], noun: str, extra: JsonDict | None = None) -> web.Response:
    """Return the response to news of a session or of a lease, as the noun says."""
    verdict = await run_to_end(news)
    if verdict in _REFUSED:
        raise refusal(verdict, noun)
    return json_reply(200, {"verdict": str(verdict), **(extra or {})})


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Do work to its end although the client leaves: half of it may be done, such as the end of a session."""
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return await asyncio.shield(task)


def refusal(verdict: Verdict, noun: str) -> RequestError:
    """Return the error for news that have no effect."""
    status, text = _REFUSED[verdict]
    return RequestError(status, str(verdict), text.format(noun))


def error_reply(status: int, code: str, message: str) -> web.Response:
    """Return a response with an error; clients may repeat a request that got 429."""
    headers = {"retry-after": "1"} if status == 429 else {"x-should-retry": "false"}
    return json_reply(status, {"error": {"code": code, "message": message}}, headers)


def json_reply(status: int, body: object, headers: dict[str, str] | None = None) -> web.Response:
    """Return a response with a JSON value."""
    return web.Response(body=write_json(body), status=status, content_type="application/json", headers=headers)
