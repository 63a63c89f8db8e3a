"""
The control port: outside agents lease tasks, and scorers report scores.

It is not the port of the agents' models, and has another secret: a model that finds out how its agent calls it can
neither score itself nor read other sessions.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, Self

import structlog
from aiohttp import web
from attrs import asdict, define, field

from turnwise.errors import ConfigError
from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects.strict_json import read_json, write_json
from turnwise_gateway.host import ModelClient
from turnwise_gateway.pool.atif import describe_session, export_session
from turnwise_gateway.pool.leased_session import LeasedSession
from turnwise_gateway.pool.scores import ScoreReport, check_number
from turnwise_gateway.pool.store import Lease, PoolError, Verdict
from turnwise_gateway.pool.task_pool import TaskPool
from turnwise_gateway.server.options import ServerOptions

MAX_WAIT_S: Final = 60.0
"""Longest wait of a request for a lease; proxies and clients close connections that are silent for longer."""
MAX_BODY_BYTES: Final = 1024 * 1024
STATUS: Final = {
    Verdict.ACCEPTED: 200,
    Verdict.REPEATED: 200,
    Verdict.CONFLICT: 409,
    Verdict.LATE: 409,
    Verdict.UNKNOWN: 404,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionDesk(Protocol):
    """Opens and finds the sessions of leases."""

    def open(self, lease: Lease) -> ModelClient | None:
        """Open the session of a new lease; None when nobody waits for its rollout any more."""

    def find(self, session_id: str) -> LeasedSession | None:
        """Return a session by the name of its lease, also for a while after its end; None for an unknown one."""

    def model_name(self) -> str:
        """Return the name of the model."""


class _RequestError(Exception):
    """A request that has no effect; becomes a response."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def build_control_app(
    pool: TaskPool, desk: SessionDesk, secret: str, options: ServerOptions | None = None
) -> web.Application:
    """
    Return the application of the control port.

    Args:
        pool: hands out the tasks.
        desk: opens the sessions.
        secret: bearer token of every request, at least 16 characters.
        options: names by which requests may address the server.

    Raises:
        ConfigError: the secret is too short.
    """
    if len(secret) < 16:
        raise ConfigError("the secret of the control port needs at least 16 characters")
    control = _Control(pool, desk, secret.encode(), options or ServerOptions())
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[control.guard])
    app.add_routes(
        [
            web.get("/tasks", control.show_stats),
            web.post("/tasks/lease", control.lease),
            web.post("/leases/{id}/heartbeat", control.renew),
            web.post("/leases/{id}/complete", control.complete),
            web.post("/leases/{id}/fail", control.fail),
            web.post("/sessions/{id}/score", control.score),
            web.get("/sessions/{id}", control.show_session),
        ]
    )
    return app


class ControlServer:
    """
    Serves the control port. An async context manager.

    Args:
        app: of `build_control_app`.
        options: addresses and limits; the same that the application has.
    """

    def __init__(self, app: web.Application, options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        # An agent that hangs up while it waits takes no task: its handler is cancelled.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        self._port = 0

    @property
    def url(self) -> str:
        """Address of the started server, such as `http://127.0.0.1:8000`."""
        host = self._options.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._options.host, self._options.port).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()


@define(eq=False)
class _Control:
    pool: TaskPool
    desk: SessionDesk
    secret: bytes
    options: ServerOptions
    guard: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._respond(request, handler)

        self.guard = guard

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Run a handler for a request that has the secret; every failure becomes JSON."""
        try:
            self._check_access(request)
            return await handler(request)
        except _RequestError as error:
            return _error(error.status, error.code, error.message)
        except (CallRefusedError, PoolError) as error:
            return _error(400, "invalid", str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason.lower().replace(" ", "_"), error.reason)
        except Exception as error:  # noqa: BLE001 - a client gets JSON, and no text of ours
            structlog.get_logger().exception("a control request failed", error=str(error))
            return _error(500, "failed", "the server failed")

    def _check_access(self, request: web.Request) -> None:
        self.options.check_host(request.headers.getall("Host", []))
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self.secret):
            raise _RequestError(401, "unauthorized", "the bearer token is missing or wrong")

    async def show_stats(self, _request: web.Request) -> web.Response:
        return _json(200, {"stats": await self.pool.stats()})

    async def lease(self, request: web.Request) -> web.Response:
        body = await _read(request, {"worker", "wait_s"})
        worker, wait_s = body.get("worker"), body.get("wait_s", 0)
        if not isinstance(worker, str) or not 1 <= len(worker) <= 128:
            raise PoolError("'worker' must be a text of 1 to 128 characters")
        check_number("wait_s", wait_s)
        lease = await self.pool.lease(worker, wait_s=min(wait_s, MAX_WAIT_S))
        if lease is None:
            return web.Response(status=204)
        # No await from here on: a lease whose client leaves now has a session, and expires.
        access = self.desk.open(lease)
        if access is None:
            return web.Response(status=204)
        names = {"id": lease.id, "fence": lease.fence, "attempt": lease.attempt, "expires_in_s": self.pool.lease_s}
        rollout = {"uid": lease.uid, "global_step": lease.global_step, "rollout_n": lease.rollout_n}
        return _json(200, {"lease": names, "task": {**rollout, **lease.content}, "session": asdict(access)})

    async def renew(self, request: web.Request) -> web.Response:
        body = await _read(request, {"fence"})
        verdict = await self.pool.heartbeat(request.match_info["id"], _fence(body))
        return _tell(verdict, {"expires_in_s": self.pool.lease_s})

    async def complete(self, request: web.Request) -> web.Response:
        body = await _read(request, {"fence", "score", "metrics"})
        lease_id, fence, score = request.match_info["id"], _fence(body), body.get("score")
        metrics = _metrics(body)
        if score is not None:
            check_number("score", score)
        session = self.desk.find(lease_id)
        if session is not None and fence == session.lease.fence:
            reported = session.reported_score()
            if None not in (reported, score) and reported != score:
                return _tell(Verdict.CONFLICT)
            score = reported if score is None else score
            metrics = {**session.scores.metrics, **metrics}
            session.end()  # before the first await, so no score comes in between and is lost
        verdict = await self.pool.complete(lease_id, fence, score=_as_float(score), metrics=metrics)
        return _tell(verdict)

    async def fail(self, request: web.Request) -> web.Response:
        body = await _read(request, {"fence", "reason", "owner"})
        reason, owner = body.get("reason", ""), body.get("owner", "agent")
        if not isinstance(reason, str) or owner not in ("agent", "infra"):
            raise PoolError("'reason' must be a text, and 'owner' agent or infra")
        session = self.desk.find(request.match_info["id"])
        verdict = await self.pool.fail(request.match_info["id"], _fence(body), reason=reason[:2000], owner=owner)
        if session is not None and verdict is Verdict.ACCEPTED:
            session.end()
        return _tell(verdict)

    async def score(self, request: web.Request) -> web.Response:
        session = self._find(request)
        body = await _read(request, {"id", "score", "record", "turn", "metrics"})
        name, score = body.get("id"), body.get("score")
        if not isinstance(name, str):
            raise PoolError("'id' must be a text")
        check_number("score", score)
        report = ScoreReport(
            id=name,
            score=float(body["score"]),
            record=body.get("record"),
            turn=body.get("turn"),
            metrics=_metrics(body),
        )
        kind, number = report.target
        if kind != "session" and number >= session.size(kind):
            raise _RequestError(404, "unknown", f"the session has no number {number} among its {kind}")
        verdict = session.scores.report(report)
        if kind == "session" and verdict in (Verdict.ACCEPTED, Verdict.REPEATED):
            # The score of the whole session ends it, whoever reports it. A report that was cut off half-way may be
            # known to the session alone, so a repeated one is passed on too.
            session.end()
            lease, metrics = session.lease, dict(session.scores.metrics)
            verdict = await self.pool.complete(lease.id, lease.fence, score=report.score, metrics=metrics)
        return _tell(verdict)

    async def show_session(self, request: web.Request) -> web.Response:
        session = self._find(request)
        form = request.query.get("format", "json")
        if form not in ("json", "atif"):
            raise PoolError(f"'format' must be json or atif: {form!r}")
        if form == "atif":
            return _json(200, export_session(session, model=self.desk.model_name()))
        return _json(200, describe_session(session))

    def _find(self, request: web.Request) -> LeasedSession:
        session = self.desk.find(request.match_info["id"])
        if session is None:
            raise _RequestError(404, "unknown", "there is no such session")
        return session


async def _read(request: web.Request, fields: set[str]) -> dict[str, Any]:
    body = read_json(await request.read())
    if unknown := sorted(body.keys() - fields):
        raise PoolError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    return body


def _fence(body: dict[str, Any]) -> int:
    fence = body.get("fence")
    if type(fence) is not int:
        raise PoolError("'fence' must be the whole number of the lease")
    return fence


def _metrics(body: dict[str, Any]) -> dict[str, float]:
    metrics = body.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise PoolError("'metrics' must be an object of numbers")
    for name, value in metrics.items():
        check_number(f"metrics.{name}", value)
    return metrics


def _as_float(score: object) -> object:
    """Return 1 as 1.0, so that equal scores have equal texts."""
    return float(score) if isinstance(score, int | float) else score


def _tell(verdict: Verdict, extra: JsonDict | None = None) -> web.Response:
    status = STATUS[verdict]
    if status == 200:
        return _json(200, {"verdict": str(verdict), **(extra or {})})
    messages = {
        Verdict.CONFLICT: "another score or end was reported before",
        Verdict.LATE: "the lease has ended",
        Verdict.UNKNOWN: "there is no such lease",
    }
    return _error(status, str(verdict), messages[verdict])


def _error(status: int, code: str, message: str) -> web.Response:
    return _json(status, {"error": {"code": code, "message": message}}, {"x-should-retry": "false"})


def _json(status: int, body: object, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=write_json(body), status=status, content_type="application/json", headers=headers)
