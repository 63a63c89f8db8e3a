"""
The control port: outside agents lease tasks, and scorers report scores.

It is not the port of the agents' models, and has another secret: a model that finds out how its agent calls it can
neither score itself nor read other sessions.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from attrs import frozen

from turnwise.errors import Owner
from turnwise.types import JsonDict
from turnwise_gateway.control.control_server import (
    json_reply,
    read_body,
    read_failure,
    read_metrics,
    refusal,
    tell,
)
from turnwise_gateway.control.scores import Verdict, check_number
from turnwise_gateway.control.session_routes import build_control_app
from turnwise_gateway.server.options import ServerOptions
from turnwise_task_pool.driver.offers import Offers, Plain
from turnwise_task_pool.pool.store import Lease, PoolError
from turnwise_task_pool.pool.task_pool import TaskPool

MAX_WAIT_S: Final = 60.0
"""Longest wait of a request for a lease; proxies and clients close connections that are silent for longer."""


def build_pool_app(
    pool: TaskPool, offers: Offers, secret: str, options: ServerOptions | None = None
) -> web.Application:
    """Return the application of the control port, for the workers' offers; errors as for `build_control_app`."""
    control = PoolControl(pool, offers)
    routes = [
        web.get("/tasks", control.show_stats),
        web.post("/tasks/lease", control.lease),
        web.post("/leases/{id}/heartbeat", control.renew_lease),
        web.post("/leases/{id}/complete", control.complete_lease),
        web.post("/leases/{id}/fail", control.fail_lease),
    ]
    return build_control_app(control, secret, options or ServerOptions(), routes)


@frozen(eq=False)
class PoolControl:
    """The `ControlledSessions` of a pool, which are in workers, and the routes of its leases."""

    pool: TaskPool
    offers: Offers

    def find_key(self, session_id: str) -> str | None:
        lease = self.offers.find(session_id)
        return None if lease is None else lease.control_key

    async def list(self) -> JsonDict:
        return {"stats": await self.pool.stats(), "sessions": await self.offers.summaries()}

    async def show(self, session_id: str, form: str = "json") -> JsonDict:
        found: JsonDict | None = await self.offers.ask(session_id, "show", form=form)
        if found is None:
            raise refusal(Verdict.UNKNOWN, "session")
        return found

    async def score(self, session_id: str, body: dict[str, Any]) -> Verdict:
        lease = self.offers.find(session_id)
        found = await self.offers.ask(session_id, "score", report=body)
        if lease is None or found is None:  # perhaps the session ended long ago, or with an earlier process
            return await self.pool.find_end(session_id)
        return await self._end(session_id, lease.fence, found)

    async def fail(self, session_id: str, owner: Owner, reason: str, fence: int | None = None) -> Verdict:
        """Fail a lease whose news have a fence; None for news of its session, which has no other lease."""
        lease = self.offers.find(session_id)
        if fence is None:
            fence = 0 if lease is None else lease.fence
        verdict = await self.pool.fail(session_id, fence, reason=reason, owner=owner)
        if lease is not None and verdict is Verdict.ACCEPTED:
            lease.link.tell("end", session=session_id)
            self.offers.note_end(session_id)
        return verdict

    async def end(self, session_id: str) -> JsonDict:
        shown, lease = await self.show(session_id), self.offers.find(session_id)
        if lease is None or shown["is_over"]:
            return shown
        verdict = await self._complete(session_id, lease.fence, score=None, metrics={})
        if verdict not in (Verdict.ACCEPTED, Verdict.REPEATED):  # the lease has expired
            raise refusal(verdict, "session")
        return await self.show(session_id)

    async def _complete(self, lease_id: str, fence: int, **given: object) -> Verdict:
        lease = self.offers.find(lease_id)
        is_current = lease is not None and lease.fence == fence
        found = await self.offers.ask(lease_id, "end", **given) if is_current else None
        return await self._end(lease_id, fence, found or given)

    async def _end(self, lease_id: str, fence: int, found: Plain) -> Verdict:
        """Tell the pool of an end, unless the worker of the session has another verdict than that."""
        if "verdict" in found:
            return Verdict(found["verdict"])
        verdict = await self.pool.complete(lease_id, fence, score=found["score"], metrics=found["metrics"])
        self.offers.note_end(lease_id)
        return verdict

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
            access = await self._open(lease)
            if access is not None:
                names = {"id": lease.id, "fence": lease.fence, "attempt": lease.attempt}
                rollout = {"uid": lease.uid, "global_step": lease.global_step, "rollout_n": lease.rollout_n}
                described = {"lease": {**names, "expires_in_s": self.pool.lease_s}, "session": access}
                return json_reply(200, {**described, "task": {**rollout, **lease.content}})
        return web.Response(status=204)

    async def _open(self, lease: Lease) -> JsonDict | None:
        try:
            return await self.offers.open(lease)
        except asyncio.CancelledError:
            self.pool.take_back(lease)  # a session that was opened ends with the next lease
            raise

    async def renew_lease(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence"})
        renewal = self.pool.heartbeat(request.match_info["id"], _fence(body))
        return await tell(renewal, "lease", {"expires_in_s": self.pool.lease_s})

    async def complete_lease(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"fence", "score", "metrics"})
        fence, score, metrics = _fence(body), body.get("score"), read_metrics(body)
        if score is not None:
            check_number("score", score)
            score = float(score)  # so that equal scores have equal texts in the pool
        return await tell(self._complete(request.match_info["id"], fence, score=score, metrics=metrics), "lease")

    async def fail_lease(self, request: web.Request) -> web.Response:
        reason, owner, body = await read_failure(request, "fence")
        return await tell(self.fail(request.match_info["id"], owner, reason, _fence(body)), "lease")


def _fence(body: dict[str, Any]) -> int:
    fence = body.get("fence")
    if type(fence) is not int:
        raise PoolError("'fence' must be the whole number of the lease")
    return fence
