"""
The control port: outside agents lease tasks, and scorers report scores.

It is not the port of the agents' models, and has another secret: a model that finds out how its agent calls it can
neither score itself nor read other sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from aiohttp import web
from attrs import asdict, define, field

from turnwise_gateway.control.control_server import (
    RequestError,
    build_app,
    json_reply,
    read_body,
    read_failure,
    read_metrics,
    tell,
)
from turnwise_gateway.control.scores import Verdict, check_number
from turnwise_gateway.control.session_routes import read_form
from turnwise_gateway.host import ModelClient
from turnwise_gateway.server.options import ServerOptions
from turnwise_task_pool.driver.offers import Offers, Plain, WorkerGoneError
from turnwise_task_pool.pool.store import Lease, PoolError
from turnwise_task_pool.pool.task_pool import TaskPool

MAX_WAIT_S: Final = 60.0
"""Longest wait of a request for a lease; proxies and clients close connections that are silent for longer."""


def build_control_app(
    pool: TaskPool, offers: Offers, secret: str, options: ServerOptions | None = None
) -> web.Application:
    """
    Return the application of the control port.

    Args:
        pool: hands out the tasks.
        offers: knows the workers of their sessions.
        secret: bearer token of every request, at least 16 characters.
        options: names by which requests may address the server.

    Raises:
        ConfigError: the secret is too short.
    """
    control = _Control(pool, offers)
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
    offers: Offers
    _ending: set[asyncio.Task[web.Response]] = field(factory=set)

    async def show_stats(self, _request: web.Request) -> web.Response:
        return json_reply(200, {"stats": await self.pool.stats()})

    async def lease(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"worker", "wait_s"})
        worker, wait_s = body.get("worker"), body.get("wait_s", 0)
        if not isinstance(worker, str) or not 1 <= len(worker) <= 128:
            raise PoolError("'worker' must be a text of 1 to 128 characters")
        check_number("wait_s", wait_s)
        end = self.pool.clock() + min(wait_s, MAX_WAIT_S)
        while (lease := await self.pool.lease(worker, wait_s=max(0.0, end - self.pool.clock()))) is not None:
            # A lease whose client leaves meanwhile is taken back; once it has a session and is on its way, it expires.
            client = await self._open(lease)
            if client is not None:
                names = {"id": lease.id, "fence": lease.fence, "attempt": lease.attempt}
                rollout = {"uid": lease.uid, "global_step": lease.global_step, "rollout_n": lease.rollout_n}
                described = {"lease": {**names, "expires_in_s": self.pool.lease_s}, "session": asdict(client)}
                return json_reply(200, {**described, "task": {**rollout, **lease.content}})
        return web.Response(status=204)

    async def _open(self, lease: Lease) -> ModelClient | None:
        try:
            return await self.offers.open(lease)
        except asyncio.CancelledError:
            self.pool.take_back(lease)  # a session that was opened ends with the next lease
            raise

    async def renew(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence"})
        verdict = await self.pool.heartbeat(request.match_info["id"], _fence(body))
        return tell(verdict, {"expires_in_s": self.pool.lease_s})

    async def complete(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence", "score", "metrics"})
        fence, score, metrics = _fence(body), body.get("score"), read_metrics(body)
        if score is not None:
            check_number("score", score)
        return await self._to_end(self._complete(request.match_info["id"], fence, _as_float(score), metrics))

    async def _complete(self, lease_id: str, fence: int, score: object, metrics: dict[str, float]) -> web.Response:
        found = await self._ask(lease_id, "complete", fence=fence, score=score, metrics=metrics)
        if found is not None and "verdict" in found:
            return tell(Verdict(found["verdict"]))
        if found is not None:
            score, metrics = found["score"], found["metrics"]
        return await self._end(lease_id, fence, score, metrics)

    async def fail(self, request: web.Request) -> web.Response:
        reason, owner, body = await read_failure(request, "fence")
        lease_id = request.match_info["id"]
        verdict = await self.pool.fail(lease_id, _fence(body), reason=reason, owner=owner)
        link = self.offers.find(lease_id)
        if link is not None and verdict is Verdict.ACCEPTED:
            link.tell("end", session=lease_id)
            self.offers.note_end(lease_id)
        return tell(verdict)

    async def score(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"id", "score", "record", "turn", "metrics"})
        return await self._to_end(self._score(request.match_info["id"], body))

    async def _score(self, lease_id: str, body: Plain) -> web.Response:
        found = await self._ask(lease_id, "score", report=body)
        if found is None:  # perhaps the session ended long ago, or with an earlier process
            return tell(await self.pool.find_end(lease_id))
        if "score" not in found:
            return tell(Verdict(found["verdict"]))
        return await self._end(lease_id, found["fence"], found["score"], found["metrics"])

    async def show_session(self, request: web.Request) -> web.Response:
        found = await self._ask(request.match_info["id"], "show", form=read_form(request))
        if found is None:
            raise RequestError(404, "unknown", "there is no such session")
        return json_reply(200, found["shown"])

    async def _end(self, lease_id: str, fence: int, score: object, metrics: dict[str, float]) -> web.Response:
        verdict = await self.pool.complete(lease_id, fence, score=score, metrics=metrics)
        self.offers.note_end(lease_id)
        return tell(verdict)

    async def _ask(self, lease_id: str, kind: str, **body: object) -> Plain | None:
        """Ask the worker of a session; None if nobody knows the session."""
        link = self.offers.find(lease_id)
        if link is None:
            return None
        try:
            found: Plain | None = await link.ask(kind, session=lease_id, **body)
        except WorkerGoneError as error:
            # It has just died, or left: the client asks again, and then gets the answer of the pool.
            raise RequestError(429, "worker_gone", "the worker of the session is gone: ask again") from error
        return found

    async def _to_end(self, work: Coroutine[Any, Any, web.Response]) -> web.Response:
        """Run news to their end although the client leaves: their session ends before the pool hears of it."""
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return await asyncio.shield(task)


def _fence(body: dict[str, Any]) -> int:
    fence = body.get("fence")
    if type(fence) is not int:
        raise PoolError("'fence' must be the whole number of the lease")
    return fence


def _as_float(score: object) -> object:
    """Return 1 as 1.0, so that equal scores have equal texts."""
    return float(score) if isinstance(score, int | float) else score
