"""
The control port: outside agents lease tasks, and scorers report scores.

It is not the port of the agents' models, and has another secret: a model that finds out how its agent calls it can
neither score itself nor read other sessions.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from aiohttp import web
from attrs import asdict, define

from turnwise_gateway.control.attempt import Verdict
from turnwise_gateway.control.control_server import (
    ControlServer,
    build_app,
    json_reply,
    read_body,
    read_failure,
    read_metrics,
    tell,
)
from turnwise_gateway.control.scores import check_number
from turnwise_gateway.control.session_routes import SessionFinder, find_session, score_session, show_session
from turnwise_gateway.host import ModelClient
from turnwise_gateway.server.options import ServerOptions
from turnwise_task_pool.leased_session import LeasedSession
from turnwise_task_pool.store import Lease, PoolError
from turnwise_task_pool.task_pool import TaskPool

__all__ = ["ControlServer", "SessionDesk", "build_control_app"]

MAX_WAIT_S: Final = 60.0
"""Longest wait of a request for a lease; proxies and clients close connections that are silent for longer."""


class SessionDesk(SessionFinder[LeasedSession], Protocol):
    """Opens and finds the sessions of leases."""

    def open(self, lease: Lease) -> ModelClient | None:
        """Open the session of a new lease; None when nobody waits for its rollout any more."""


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
    control = _Control(pool, desk)
    routes = [
        web.get("/tasks", control.show_stats),
        web.post("/tasks/lease", control.lease),
        web.post("/leases/{id}/heartbeat", control.renew),
        web.post("/leases/{id}/complete", control.complete),
        web.post("/leases/{id}/fail", control.fail),
        web.post("/sessions/{id}/score", control.score),
        web.get("/sessions/{id}", control.show_session),
    ]
    return build_app(routes, secret, options or ServerOptions())


@define(eq=False)
class _Control:
    pool: TaskPool
    desk: SessionDesk

    async def show_stats(self, _request: web.Request) -> web.Response:
        return json_reply(200, {"stats": await self.pool.stats()})

    async def lease(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"worker", "wait_s"})
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
        return json_reply(200, {"lease": names, "task": {**rollout, **lease.content}, "session": asdict(access)})

    async def renew(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence"})
        verdict = await self.pool.heartbeat(request.match_info["id"], _fence(body))
        return tell(verdict, {"expires_in_s": self.pool.lease_s})

    async def complete(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence", "score", "metrics"})
        lease_id, fence, score = request.match_info["id"], _fence(body), body.get("score")
        metrics = read_metrics(body)
        if score is not None:
            check_number("score", score)
        session = self.desk.find(lease_id)
        if session is not None and fence == session.names.fence:
            reported = session.reported_score()
            if None not in (reported, score) and reported != score:
                return tell(Verdict.CONFLICT)
            score = reported if score is None else score
            metrics = {**session.scores.metrics, **metrics}
            session.end()  # before the first await, so no score comes in between and is lost
        verdict = await self.pool.complete(lease_id, fence, score=_as_float(score), metrics=metrics)
        return tell(verdict)

    async def fail(self, request: web.Request) -> web.Response:
        reason, owner, body = await read_failure(request, "fence")
        session = self.desk.find(request.match_info["id"])
        verdict = await self.pool.fail(request.match_info["id"], _fence(body), reason=reason, owner=owner)
        if session is not None and verdict is Verdict.ACCEPTED:
            session.end()
        return tell(verdict)

    async def score(self, request: web.Request) -> web.Response:
        session = self.desk.find(request.match_info["id"])
        if session is None:  # perhaps it ended long ago, or with an earlier process
            verdict = await self.pool.find_end(request.match_info["id"])
            return tell(verdict)
        return await score_session(session, request, self._complete)

    async def show_session(self, request: web.Request) -> web.Response:
        return show_session(find_session(self.desk, request), request, self.desk.model_name())

    async def _complete(self, session: LeasedSession, score: float, metrics: dict[str, float]) -> Verdict:
        return await self.pool.complete(session.names.id, session.names.fence, score=score, metrics=metrics)


def _fence(body: dict[str, Any]) -> int:
    fence = body.get("fence")
    if type(fence) is not int:
        raise PoolError("'fence' must be the whole number of the lease")
    return fence


def _as_float(score: object) -> object:
    """Return 1 as 1.0, so that equal scores have equal texts."""
    return float(score) if isinstance(score, int | float) else score
