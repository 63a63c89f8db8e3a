"""
One task pool for several workers.

All of them open the same file, and each serves the control port. Any of them may hand out any episode, but its session
lives in the worker that runs the episode, its runner: the others have it opened there, and pass its news on.

The file may come from an earlier run whose process died. Sessions die with their process, so an episode that is
offered again has all its attempts, and its earlier result is removed; fences continue, so late news of the dead leases
change nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import ClientError, ClientSession, web
from attrs import asdict, define, field

from turnwise.errors import ConfigError, Owner
from turnwise_gateway.control.control_server import read_body
from turnwise_gateway.dialects.strict_json import write_json
from turnwise_gateway.host import ModelClient
from turnwise_gateway.server.options import ServerOptions
from turnwise_task_pool.control import SessionDesk, build_control_app
from turnwise_task_pool.site import PullSite, find_workers
from turnwise_task_pool.sqlite_rows import FROM_ROLLOUT, LEASE_COLUMNS, parse_name, read_lease
from turnwise_task_pool.sqlite_store import SqliteStore
from turnwise_task_pool.store import Lease, PoolError, PoolTask, State
from turnwise_task_pool.task_pool import TaskPool

POLL_S: Final = 0.2
"""Seconds between looks for episodes of other workers, and for workers that died."""
_OPEN_PATH: Final = "/workers/open"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def name_task(uid: str, *, validation: bool, copy: int) -> str:
    """Return the name of a task in the pool; of equal episodes that run at once, each has another number as a copy."""
    return json.dumps([uid, validation, copy])


class HeldError(PoolError):
    """An episode that another worker runs."""


@define(eq=False, kw_only=True)
class SharedStore(SqliteStore):
    """
    The file of a pool that several workers have open; each ends only the leases of its own episodes.

    Attributes:
        runner: name of this worker.
        peers: returns the names of the other workers that are alive.
    """

    runner: str
    peers: Callable[[], Collection[str]]

    def join(self, control_file: Path) -> None:
        """
        End the episodes of workers that died with an earlier run.

        Raises:
            ConfigError: the workers of another control port use the file.
        """
        with self._transaction():
            (other,) = self._one("SELECT control_file FROM site") or (None,)
            if other not in (None, str(control_file)) and find_workers(Path(other)):
                raise ConfigError(f"agent.pool_file: {self.path} is in use by the run with the control file {other}")
            self._run("INSERT OR REPLACE INTO site VALUES (1, ?)", str(control_file))
            runners = {
                name for (name,) in self._all("SELECT DISTINCT runner FROM rollout WHERE state IN ('ready', 'leased')")
            }
        for name in runners - {self.runner, *self.peers()}:
            self.end_worker(name)

    def put(self, task: PoolTask, *, capacity: int) -> bool:
        """
        Add the rollout of an episode, which has no result any more if it had one; otherwise as `TaskStore.put`.

        Raises:
            HeldError: another worker runs it.
        """
        (rollout_n,) = task.rollouts
        names = (task.uid, task.global_step, rollout_n)
        where = "WHERE uid = ? AND global_step = ? AND rollout_n = ?"
        with self._transaction():
            found = self._one(f"SELECT group_number, rollout_n, state, runner {FROM_ROLLOUT} {where}", *names)
            if found is None:
                if not self._add(task, capacity):
                    return False
            else:
                *key, state, runner = found
                is_open = state in (State.READY, State.LEASED)
                if is_open and runner in self.peers():
                    raise HeldError(f"worker {runner!r} runs the episode")
                if not is_open and not self._has_room(1, capacity):
                    return False
                self._reopen((key[0], key[1]))
            groups = "(SELECT number FROM task_group WHERE uid = ? AND global_step = ?)"
            self._run(
                f"UPDATE rollout SET runner = ? WHERE rollout_n = ? AND group_number = {groups}",
                *(self.runner, rollout_n, task.uid, task.global_step),
            )
        return True

    def abandon(self, uid: str, global_step: int, rollout_n: int, *, owner: Owner, reason: str) -> bool:
        where = "WHERE uid = ? AND global_step = ? AND rollout_n = ?"
        names = (uid, global_step, rollout_n)
        runner = self._one(f"SELECT runner {FROM_ROLLOUT} {where}", *names)
        # After a hang, another worker may run the episode.
        return runner == (self.runner,) and super().abandon(*names, owner=owner, reason=reason)

    def expire(self, *, now: float) -> list[Lease]:
        where = "WHERE state = 'leased' AND until <= ? AND runner = ? ORDER BY fence"
        with self._transaction():
            rows = self._all(f"SELECT {LEASE_COLUMNS} {FROM_ROLLOUT} {where}", now, self.runner)
            ended = [read_lease(row) for row in rows]
            for lease in ended:
                self._expire(lease)
        return ended

    def next_expiry(self) -> float | None:
        (until,) = self._row("SELECT min(until) FROM rollout WHERE state = 'leased' AND runner = ?", self.runner)
        return None if until is None else float(until)

    def runner_of(self, lease_id: str) -> str | None:
        """Return the worker of a lease's episode; None for a lease that never was."""
        parts = parse_name(lease_id)
        where = "WHERE group_number = ? AND rollout_n = ?"
        row = parts and self._one(f"SELECT runner FROM rollout {where}", *parts[:2])
        return str(row[0]) if row else None

    def end_worker(self, runner: str) -> int:
        """End the rollouts of a worker that died; return how many it had."""
        columns, where = "group_number, rollout_n", "state IN ('ready', 'leased') AND runner = ?"
        with self._transaction():
            keys = self._all(f"SELECT {columns} FROM rollout WHERE {where}", runner)
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
        await self._do(self.store.join, self.site.file)
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
        """Have the session of a lease opened by its runner; return whether the agent can have the lease."""
        runner = await self._do(self.store.runner_of, lease.id)
        if runner == self.store.runner:
            return True
        url = self.site.peers().get(runner or "")
        try:
            if url is not None:
                async with self._http.post(url + _OPEN_PATH, data=write_json(asdict(lease))) as response:
                    if response.status == 200:
                        self.opened[lease.id] = ModelClient(**await response.json())
                        return True
        except ClientError as error:  # it dies, and `_watch_peers` ends its episodes
            structlog.get_logger().debug("worker not reached", worker=runner, error=repr(error))
        except asyncio.CancelledError:
            self._unseen.append(lease)  # the agent has left; a session that was opened ends with the next lease
            self._changed.set()
            raise
        return False

    async def runner_of(self, lease_id: str) -> str | None:
        """Return another worker that runs the episode of a lease; None when it runs here, or no longer anywhere."""
        runner = await self._do(self.store.runner_of, lease_id)
        if runner in (None, self.store.runner):
            return None
        if runner in self.site.peers():
            return runner
        await self._do(self.store.end_worker, runner)  # before its news are judged: the episode runs again elsewhere
        return None

    async def forward(self, runner: str, request: web.Request) -> web.Response:
        """Send a request to the worker that runs the episode, and return its response."""
        url = self.site.peers().get(runner, "") + request.path_qs
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


_LEASE_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "id": str,
    "worker": str,
    "uid": str,
    "attempt": int,
    "global_step": int,
    "rollout_n": int,
    "fence": int,
    "content": dict,
    "until": (int, float),
}


def _read_lease(body: dict[str, Any]) -> Lease:
    """Return a lease that another worker has given out; `PoolError` unless the body is one."""
    for name, kind in _LEASE_TYPES.items():
        if not isinstance(body.get(name), kind):
            raise PoolError(f"the lease has no valid {name!r}")
    return Lease(**body)


def build_shared_app(pool: SharedPool, desk: SessionDesk, options: ServerOptions) -> web.Application:
    """Return the control port of one worker among several."""

    @web.middleware
    async def relay(request: web.Request, handler: Handler) -> web.StreamResponse:
        lease_id = request.match_info.get("id")
        if lease_id is None or desk.find(lease_id) is not None:
            return await handler(request)
        runner = await pool.runner_of(lease_id)
        if runner is None:
            return await handler(request)
        try:
            return await pool.forward(runner, request)
        except ClientError as error:
            # It has just died, or left: the client asks again, and then gets the answer of the pool.
            raise web.HTTPTooManyRequests(headers={"retry-after": "1"}) from error

    async def open_session(request: web.Request) -> web.Response:
        access = desk.open(_read_lease(await read_body(request, set(_LEASE_TYPES))))
        if access is None:
            return web.Response(status=204)
        return web.Response(body=write_json(asdict(access)), content_type="application/json")

    app = build_control_app(pool, desk, pool.site.access.secret, options)
    app.middlewares.append(relay)  # behind the check of the secret
    app.router.add_post(_OPEN_PATH, open_session)
    return app
