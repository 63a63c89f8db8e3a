"""The server: one port for all sessions, each with a key."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from weakref import WeakKeyDictionary, WeakSet

import structlog
from aiohttp import web
from attrs import define, evolve

from turnwise.types import JsonObject
from turnwise_gateway.calls import CallerCheck, CallRefusedError, Directory, ModelCall, OtherModels, SessionBackend
from turnwise_gateway.dialects import Dialect, headers_of, keep_headers, status_of, write_json
from turnwise_gateway.dialects.fields import MAX_NAME_CHARS
from turnwise_gateway.server.body_reader import BodyReader
from turnwise_gateway.server.closing import close_runner
from turnwise_gateway.server.delivery import SERVER_HEADERS, Delivery, connection_of
from turnwise_gateway.server.forwarding import Forwarder, find_forwarding
from turnwise_gateway.server.listening import listen, listen_at
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.receipt import AgentsServer, Connection, read_body
from turnwise_gateway.server.routes import Route, find_route, guess_dialect, is_base
from turnwise_gateway.server.tool_replies import ToolReplies

FOREIGN_CALLER = (
    "the API key was given to another program; the agent's option `bind_keys: false` lets proxies and containers call"
)
OTHER_WORKSPACE = "the API key belongs to a program in another place: a workspace reaches its own session alone"
_MAX_REASON_CHARS = 300
_MAX_WAITING_AT_HOME = 64
"""Most idle connections of the processes in a workspace, which share the descriptors of the worker with all others."""
_SHUTDOWN_S = 1.0
"""Time for calls in flight when the server stops; then their handlers are cancelled."""


@define
class _Line:
    """The log line of a request; it has no keys, and of texts only what a refusal quotes."""

    started: float
    route: Route | None = None
    status: int = 0
    delivery: Delivery | None = None
    refused: tuple[str, str | None, str] | None = None

    def note(self, refusal: CallRefusedError) -> None:
        # Without the error itself: its traceback has this line, and so would keep all of a request for a while.
        self.refused = refusal.kind, refusal.param, refusal.message[:_MAX_REASON_CHARS]

    def write(self) -> None:
        values: dict[str, object] = {"status": self.status, "seconds": round(time.perf_counter() - self.started, 4)}
        if self.route is not None:
            route = self.route
            values |= {"action": route.action, "dialect": route.dialect.name, "session": route.session_id}
        outcome = None
        if self.delivery is not None:
            call, reply = self.delivery.exchange.call, self.delivery.reply
            outcome = self.delivery.outcome
            if self.delivery.refusal is not None:
                self.note(self.delivery.refusal)
            values |= {"stream": call.stream, "ignored": call.ignored}
            if reply is not None:
                values |= {"finish": reply.finish, "prompt_tokens": reply.usage.prompt_tokens}
                values["completion_tokens"] = reply.usage.completion_tokens
        if self.refused is not None:
            kind, values["field"], values["reason"] = self.refused
            outcome = outcome if outcome == "client_gone" else kind
        log = structlog.get_logger()
        (log.debug if outcome in {None, "delivered"} else log.info)("call of an agent", outcome=outcome, **values)


class GatewayServer:
    """
    Serves the sessions of a directory to agents. An async context manager.

    Args:
        directory: finds the session of a key.
        options: addresses and limits.
    """

    def __init__(self, directory: Directory, options: ServerOptions | None = None) -> None:
        self._directory = directory
        self._options = options or ServerOptions()
        self._runner: web.ServerRunner | None = None
        self._readers: WeakKeyDictionary[SessionBackend, BodyReader] = WeakKeyDictionary()
        self._tool_replies: WeakKeyDictionary[SessionBackend, ToolReplies] = WeakKeyDictionary()
        self._at_home: WeakSet[SessionBackend] = WeakSet()
        self._checks: WeakKeyDictionary[SessionBackend, CallerCheck] = WeakKeyDictionary()
        self._forwarder = Forwarder(self._options)
        self._num_in_flight = 0
        self._port = 0

    @property
    def port(self) -> int:
        """Port of the started server."""
        return self._port

    @property
    def num_in_flight(self) -> int:
        """Number of calls that have no whole response yet, and of left ones that are being sampled."""
        return self._num_in_flight

    def url(self, session_id: str | None = None, *, host: str | None = None) -> str:
        """
        Return the base URL for clients of Anthropic; those of OpenAI need `/v1` after it.

        Args:
            session_id: puts the session into the path; without it, the key alone names the session.
            host: by which agents reach this machine; by default the address that the server listens at.
        """
        name = host or self._options.host
        root = f"http://[{name}]:{self._port}" if ":" in name else f"http://{name}:{self._port}"
        return root if session_id is None else f"{root}/s/{session_id}"

    def bind(self, backend: SessionBackend, check: CallerCheck) -> None:
        """Let a session answer only the connections that a check admits."""
        self._checks[backend] = check

    def forget_requests(self, backend: SessionBackend) -> None:
        """Free the requests and the check of a session that has ended, because it answers no call any more."""
        self._checks.pop(backend, None)
        self._readers.pop(backend, None)
        self._tool_replies.pop(backend, None)

    async def start(self) -> None:
        """Listen; `OSError` if the address cannot be used."""
        self._runner = web.ServerRunner(AgentsServer(self._handle, self._options), shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await listen(self._runner, self._options.host, self._options.port)
        self._port = self._runner.addresses[0][1]

    @asynccontextmanager
    async def serve_at(self, listener: socket.socket, backend: SessionBackend) -> AsyncIterator[None]:
        """Answer one session at a listener inside the `async with` statement; it then answers at no other place."""
        options = evolve(self._options, max_waiting=_MAX_WAITING_AT_HOME)
        runner = web.ServerRunner(AgentsServer(self._handle, options, backend), shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._at_home.add(backend)
        try:
            await listen_at(runner, listener)
            yield
        finally:
            await close_runner(runner)

    async def stop(self) -> None:
        """Close all connections; calls in flight get a moment to end."""
        await self._forwarder.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await close_runner(runner)

    async def __aenter__(self) -> GatewayServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = connection_of(request)
        connection.begin_request()
        path = request.raw_path.partition("?")[0]
        line = _Line(time.perf_counter())
        try:
            response = await self._respond(request, path, line)
            line.status = response.status
        except CallRefusedError as error:
            line.status = status_of(error)
            line.note(error)
            response = _write_error(self._dialect(request, path, line), error)
        except Exception as error:  # noqa: BLE001  # a client gets JSON in its dialect and no text of ours
            structlog.get_logger().exception("a request failed", error=str(error))
            failure = CallRefusedError("engine", "the server failed")
            line.status = 500
            line.note(failure)
            response = _write_error(self._dialect(request, path, line), failure)
        finally:
            line.write()
            connection.end_request()
        return response

    @staticmethod
    def _dialect(request: web.BaseRequest, path: str, line: _Line) -> Dialect:
        return line.route.dialect if line.route else guess_dialect(path, request.headers)

    async def _respond(self, request: web.BaseRequest, path: str, line: _Line) -> web.StreamResponse:
        self._options.check_host(request.headers.getall("Host", []))
        if is_base(request.method, path):
            return web.Response(headers=SERVER_HEADERS)
        line.route = route = find_route(request.method, path, f"http://{request.headers['Host']}")
        backend = self._authenticate(request, route)
        await self._check_caller(connection_of(request), backend)
        if route.action == "models":
            others = backend.others
            return _write(self._list_models(others) if route.model is None else self._show_model(route.model, others))
        if request.version < (1, 1):
            # HTTP/1.0 marks no end of a stream, so half a reply would pass for a whole one.
            raise CallRefusedError("invalid", "the server needs HTTP/1.1")
        if self._num_in_flight >= self._options.max_in_flight:
            wait_s = self._options.retry_after_s
            raise CallRefusedError("overloaded", "too many calls are in flight", retry_after_s=wait_s)
        self._num_in_flight += 1
        try:
            return await self._answer(request, route, backend, line)
        except CallRefusedError as refusal:
            if refusal.kind == "session_closed":
                self.forget_requests(backend)  # this call may be later than the end of the session
            raise
        finally:
            self._num_in_flight -= 1

    async def _answer(
        self, request: web.BaseRequest, route: Route, backend: SessionBackend, line: _Line
    ) -> web.StreamResponse:
        body: bytes | None = None
        try:
            body = await read_body(request, self._options, backend.limits)
            if route.action == "tools":
                replies = self._tool_replies.setdefault(backend, ToolReplies())
                return await replies.respond(request, body, backend, self._options.send_s)
            forwarding = await find_forwarding(request, route, body, backend)
            if forwarding is not None:
                return await self._forwarder.respond(request, forwarding, backend)
            exchange = await self._readers.setdefault(backend, BodyReader(backend.limits)).read(
                route, body, request.headers
            )
        except CallRefusedError as refusal:
            if route.action == "call":
                name, headers = route.dialect.name, keep_headers(request.headers)
                backend.note_refusal(ModelCall(dialect=name, messages=(), headers=headers, body=body), refusal)
            raise
        if route.question is not None:
            return _write(await route.question(backend, exchange.call))
        with Delivery(exchange, self._options, self._count_outliving) as line.delivery:
            return await line.delivery.respond(request, backend)

    def _count_outliving(self, sampling: asyncio.Future[None]) -> None:
        """Count a call whose client has left as one in flight, until it is sampled."""
        self._num_in_flight += 1
        sampling.add_done_callback(self._forget_outliving)

    def _forget_outliving(self, _sampling: asyncio.Future[None]) -> None:
        self._num_in_flight -= 1

    def _authenticate(self, request: web.BaseRequest, route: Route) -> SessionBackend:
        """Return the session of the request's key; one key in either header is enough."""
        for key in _keys(request):
            if (backend := self._directory.find(key, route.session_id)) is not None:
                return backend
        raise CallRefusedError("unauthorized", "the API key is missing or wrong")

    async def _check_caller(self, connection: Connection, backend: SessionBackend) -> None:
        """Refuse the key of a session in a connection that its check does not admit; each connection is asked once."""
        if connection.home is not (backend if backend in self._at_home else None):
            raise CallRefusedError("foreign_caller", OTHER_WORKSPACE)
        check, transport = self._checks.get(backend), connection.transport
        if check is not None and not connection.is_proved(backend) and transport is not None:
            ends = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            try:
                is_admitted = await check.admits(*ends)
            except OSError as error:  # there are no descriptors, for example
                wait_s = self._options.retry_after_s
                raise CallRefusedError("overloaded", "the caller cannot be found", retry_after_s=wait_s) from error
            if not is_admitted:
                raise CallRefusedError("foreign_caller", FOREIGN_CALLER)
        connection.prove(backend)

    def _list_models(self, others: OtherModels) -> dict[str, object]:
        # One list with the keys of both vendors: the route is the same for both.
        names = (self._directory.model_name(), *others.names)
        data = [self._show_model(name, others) for name in names]
        return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    def _show_model(self, asked: str, others: OtherModels) -> dict[str, object]:
        name = self._directory.model_name()
        if asked != name and not others.is_served(asked):
            text = f"the run lists no model {asked[:MAX_NAME_CHARS]!r}; its own is {name!r}"
            raise CallRefusedError("not_found", text)
        model = {"id": asked, "object": "model", "created": 0, "owned_by": "turnwise"}
        return model | {"type": "model", "display_name": asked, "created_at": "1970-01-01T00:00:00Z"}


def _keys(request: web.BaseRequest) -> list[bytes]:
    """Return the keys that a request offers; aiohttp decodes headers so that their bytes can be had back."""
    found = list(request.headers.getall("x-api-key", []))
    for value in request.headers.getall("Authorization", []):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            found.append(key.strip())
    if len(found) > 2:
        raise CallRefusedError("unauthorized", "the request has more than one key")
    return [key.encode("utf-8", "surrogateescape") for key in found]


def _write(body: JsonObject) -> web.Response:
    return web.Response(body=write_json(body), content_type="application/json", headers=SERVER_HEADERS)


def _write_error(dialect: Dialect, error: CallRefusedError) -> web.Response:
    response = web.Response(
        body=write_json(dialect.describe_error(error)),
        status=status_of(error),
        content_type="application/json",
        headers=SERVER_HEADERS | headers_of(error),
    )
    if error.kind == "timeout":
        response.force_close()
    return response
