"""
One task pool for several workers.

All of them open the same file, and each serves the control port. Any of them may hand out any episode, but its session
lives in the worker that runs the episode, the owner: the others have it opened there, and pass its news on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import ClientError, ClientSession, web
from attrs import asdict, define, field

from turnwise_gateway.dialects.strict_json import read_json, write_json
from turnwise_gateway.host import ModelClient
from turnwise_gateway.pool.control import SessionDesk, build_control_app
from turnwise_gateway.pool.sqlite_rows import FROM_ROLLOUT, LEASE_COLUMNS, parse_name, read_lease
from turnwise_gateway.pool.sqlite_store import SqliteStore
from turnwise_gateway.pool.store import Lease, State
from turnwise_gateway.pool.task_pool import TaskPool
from turnwise_gateway.pull_site import PullSite
from turnwise_gateway.server.options import ServerOptions

POLL_S: Final = 0.2
"""Seconds between looks for episodes of other workers, and for workers that died."""
_OPEN_PATH: Final = "/workers/open"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def name_task(uid: str, owner: str, *, validation: bool, run: int) -> str:
    """Return the name of an episode in the pool; one that runs again gets another, also in another worker."""
    return json.dumps([uid, validation, owner, run])


@define(eq=False, kw_only=True)
class SharedStore(SqliteStore):
    """
    The file of a pool that several workers have open; each ends only the leases of its own episodes.

    Attributes:
        owner: name of this worker.
    """

    owner: str

    def expire(self, *, now: float) -> list[Lease]:
        where = "WHERE state = 'leased' AND until <= ? AND json_extract(uid, '$[2]') = ? ORDER BY fence"
        with self._transaction():
            rows = self._all(f"SELECT {LEASE_COLUMNS} {FROM_ROLLOUT} {where}", now, self.owner)
            ended = [read_lease(row) for row in rows]
            for lease in ended:
                self._expire(lease)
        return ended

    def next_expiry(self) -> float | None:
        where = "WHERE state = 'leased' AND json_extract(uid, '$[2]') = ?"
        (until,) = self._row(f"SELECT min(until) {FROM_ROLLOUT} {where}", self.owner)
        return None if until is None else float(until)

    def owner_of(self, lease_id: str) -> str | None:
        """Return the worker of a lease's episode; None for a lease that never was."""
        parts = parse_name(lease_id)
        row = parts and self._one("SELECT json_extract(uid, '$[2]') FROM task_group WHERE number = ?", parts[0])
        return str(row[0]) if row else None

    def end_worker(self, owner: str) -> int:
        """End the rollouts of a worker that died; return how many it had."""
        columns, where = "group_number, rollout_n", "state IN ('ready', 'leased') AND json_extract(uid, '$[2]') = ?"
        with self._transaction():
            keys = self._all(f"SELECT {columns} {FROM_ROLLOUT} WHERE {where}", owner)
            for group, rollout_n in keys:
                self._end((group, rollout_n), State.DEAD, "abandoned", ("null", "{}"), "infra", "its worker died")
        return len(keys)


@define(eq=False, kw_only=True)
class SharedPool(TaskPool):
    """
    A worker's view of the pool of all workers.

    Attributes:
        site: the workers that share it.
        opened: sessions that other workers opened for leases that this one hands out.
    """

    store: SharedStore
    site: PullSite
    opened: dict[str, ModelClient] = field(factory=dict, init=False)
    _http: ClientSession = field(init=False)
    _watch: asyncio.Task[None] | None = field(default=None, init=False)

    async def open(self, *, requeue: bool = False) -> None:
        await super().open(requeue=requeue)
        self._http = ClientSession(headers={"Authorization": f"Bearer {self.site.access.secret}"})
        self._watch = asyncio.get_running_loop().create_task(self._watch_peers(), name="pull-peers")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            await self._http.close()
        await super().close()

    async def lease(self, worker: str, *, wait_s: float = 0.0) -> Lease | None:
        end = self.clock() + wait_s
        while True:
            lease = await super().lease(worker, wait_s=max(0.0, end - self.clock()))
            if lease is None or await self._have_opened(lease):
                return lease

    async def _have_opened(self, lease: Lease) -> bool:
        """Have the session of a lease opened by its owner; return whether the agent can have the lease."""
        owner = _owner_in(lease)
        if owner == self.store.owner:
            return True
        url = self.site.peers().get(owner)
        try:
            if url is not None:
                async with self._http.post(url + _OPEN_PATH, data=write_json(asdict(lease))) as response:
                    if response.status == 200:
                        self.opened[lease.id] = ModelClient(**await response.json())
                        return True
        except ClientError as error:  # it dies, and `_watch_peers` ends its episodes
            structlog.get_logger().debug("worker not reached", worker=owner, error=repr(error))
        except asyncio.CancelledError:
            self._unseen.append(lease)  # the agent has left; a session that was opened ends with the next lease
            self._changed.set()
            raise
        return False

    async def owner_of(self, lease_id: str) -> str | None:
        """Return another worker that runs the episode of a lease; None when it runs here, or no longer anywhere."""
        owner = await self._do(self.store.owner_of, lease_id)
        if owner in (None, self.store.owner):
            return None
        if owner in self.site.peers():
            return owner
        await self._do(self.store.end_worker, owner)  # before its news are judged: the episode runs again elsewhere
        return None

    async def forward(self, owner: str, request: web.Request) -> web.Response:
        """Send a request to the worker that runs the episode, and return its response."""
        url = self.site.peers().get(owner, "") + request.path_qs
        async with self._http.request(request.method, url, data=await request.read()) as response:
            headers = {name: response.headers[name] for name in ("x-should-retry",) if name in response.headers}
            body = await response.read()
            return web.Response(body=body, status=response.status, content_type=response.content_type, headers=headers)

    async def _watch_peers(self) -> None:
        """End the episodes of workers that died."""
        while True:
            for name in self.site.find_dead():
                count = await self._do(self.store.end_worker, name)
                self.site.forget(name)
                self._changed.set()
                structlog.get_logger().warning("worker died", worker=name, episodes=count)
            await asyncio.sleep(POLL_S)


def build_shared_app(pool: SharedPool, desk: SessionDesk, options: ServerOptions) -> web.Application:
    """Return the control port of one worker among several."""

    @web.middleware
    async def relay(request: web.Request, handler: Handler) -> web.StreamResponse:
        lease_id = request.match_info.get("id")
        if lease_id is None or desk.find(lease_id) is not None:
            return await handler(request)
        owner = await pool.owner_of(lease_id)
        if owner is None:
            return await handler(request)
        try:
            return await pool.forward(owner, request)
        except ClientError as error:
            # It has just died, or left: the client asks again, and then gets the answer of the pool.
            raise web.HTTPTooManyRequests(headers={"retry-after": "1"}) from error

    async def open_session(request: web.Request) -> web.Response:
        access = desk.open(Lease(**read_json(await request.read())))
        if access is None:
            return web.Response(status=204)
        return web.Response(body=write_json(asdict(access)), content_type="application/json")

    app = build_control_app(pool, desk, pool.site.access.secret, options)
    app.middlewares.append(relay)  # behind the check of the secret
    app.router.add_post(_OPEN_PATH, open_session)
    return app


def _owner_in(lease: Lease) -> str:
    return str(json.loads(lease.uid)[2])
