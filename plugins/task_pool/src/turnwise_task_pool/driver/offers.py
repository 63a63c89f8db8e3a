"""The workers of a run, the episodes that they offer and the sessions of leases, as the driver knows them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import OrderedDict
from typing import Any, Final

from attrs import asdict, define, field

from turnwise.types import JsonDict
from turnwise_gateway.control.control_server import RequestError
from turnwise_task_pool.pool.store import Lease, PoolTask
from turnwise_task_pool.pool.task_pool import TaskPool

_MAX_ENDED: Final = 1024
"""Leases of ended episodes whose worker is still asked for their session."""

_LIST_S: Final = 5.0
"""Longest wait for what a worker says about its sessions."""

Plain = dict[str, Any]
"""Plain data of a call."""
Key = tuple[str, int, int]
"""A rollout: its name in the pool, its step and its number."""


class WorkerGoneError(RequestError):
    """A worker that died or left before it answered: whoever asks again gets the answer of the pool."""

    def __init__(self) -> None:
        super().__init__(429, "worker_gone", "the worker of the session is gone: ask again")


@define(eq=False)
class WorkerLink:
    """
    A worker, and the questions to it; it fetches them, and gives the answers.

    Attributes:
        offers: its episodes in the pool, by the name that it gave them.
    """

    offers: dict[str, PoolTask] = field(factory=dict)
    _numbers: itertools.count[int] = field(factory=itertools.count, init=False)
    _questions: list[tuple[int, str, Plain]] = field(factory=list, init=False)
    _answers: dict[int, asyncio.Future[Any]] = field(factory=dict, init=False)
    _any: asyncio.Event = field(factory=asyncio.Event, init=False)
    _is_gone: bool = field(default=False, init=False)
    _listing: asyncio.Future[Any] | None = field(default=None, init=False)

    async def ask(self, kind: str, **body: object) -> Any:
        """
        Ask a question and return the answer, None for an unknown session.

        Raises:
            RequestError: the request behind the question is wrong.
            WorkerGoneError: the worker died or left.
        """
        return _read_answer(await self._put(kind, body))

    def list_sessions(self) -> asyncio.Future[Any]:
        """Ask for all sessions; the answer is for `_read_answer`. Cancel it never: other callers wait for it too."""
        # One question at a time, or a worker that hangs would get one more with each request.
        if self._listing is None or self._listing.done():
            self._listing = self._put("list", {})
            self._listing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._listing

    def tell(self, kind: str, **body: object) -> None:
        """Ask a question whose answer nobody waits for."""
        if not self._is_gone:
            self._put(kind, body).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def exchange(self, answers: list[list[Any]]) -> list[tuple[int, str, Plain]]:
        """Take answers, and wait for the next questions."""
        for number, value in answers:
            future = self._answers.pop(number, None)
            if future is not None and not future.done():  # else whoever asked has left
                future.set_result(value)
        await self._any.wait()
        self._any.clear()
        questions, self._questions = self._questions, []
        return questions

    def leave(self) -> None:
        """Fail the questions without an answer, and all later ones."""
        self._is_gone = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerGoneError())

    def _put(self, kind: str, body: Plain) -> asyncio.Future[Any]:
        if self._is_gone:
            raise WorkerGoneError
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._questions.append((number, kind, body))
        self._any.set()
        return answer


@define(eq=False)
class OpenLease:
    """
    A lease that has a session, or gets one.

    Attributes:
        fence: of the lease.
        link: to the worker.
        control_key: of the session, once it is open.
    """

    fence: int
    link: WorkerLink
    control_key: str | None = None


@define(eq=False)
class Offers:
    """The episodes that wait for agents or have a lease, and the workers of all sessions."""

    pool: TaskPool
    _workers: dict[str, WorkerLink] = field(factory=dict, init=False)
    _by_key: dict[Key, tuple[str, WorkerLink]] = field(factory=dict, init=False)
    # By lease; of ended episodes only the last ones.
    _leases: OrderedDict[str, OpenLease] = field(factory=OrderedDict, init=False)
    _ended: OrderedDict[str, None] = field(factory=OrderedDict, init=False)

    def join(self, worker: str) -> None:
        """Add a worker."""
        self._workers[worker] = WorkerLink()

    async def attend(self, worker: str) -> None:
        """Wait for the end of a worker, which cancels this; then end its episodes."""
        link = self._workers[worker]
        try:
            await asyncio.Event().wait()
        finally:
            del self._workers[worker]
            link.leave()
            self._leases = OrderedDict((name, each) for name, each in self._leases.items() if each.link is not link)
            for name in list(link.offers):
                await self._end(link, name, "its worker died")

    async def exchange(self, worker: str, answers: list[list[Any]]) -> list[tuple[int, str, Plain]]:
        """Take the answers of a worker and return the next questions to it."""
        return await self._workers[worker].exchange(answers)

    async def put(self, worker: str, name: str, task: Plain) -> None:
        """Add the episode of a worker; it is handed out until `withdraw`. `PoolError` if the pool refuses it."""
        link = self._workers[worker]
        # Equal episodes may run at once, for example those of two calls: each has another number as a copy.
        for copy in itertools.count():
            uid = json.dumps([task["uid"], task["validation"], copy])
            key = uid, task["global_step"], task["rollout_n"]
            if key not in self._by_key:
                break
        self._by_key[key] = name, link
        link.offers[name] = offered = PoolTask(uid=uid, global_step=key[1], rollouts=(key[2],), content=task["content"])
        try:
            await self.pool.put(offered)
        except BaseException:  # a `put` that was cancelled runs to its end
            await self.withdraw(worker, name)
            raise

    async def withdraw(self, worker: str, name: str) -> None:
        """End an episode, whoever has a lease of it; nothing happens to one that has ended."""
        if (link := self._workers.get(worker)) is not None:
            await self._end(link, name, "the episode has ended")

    async def _end(self, link: WorkerLink, name: str, reason: str) -> None:
        task = link.offers.pop(name, None)
        if task is None:
            return
        # The key stays taken until the pool has the end: the episode may be offered again at once.
        try:
            await self.pool.abandon(task, owner="infra", reason=reason)
        finally:
            del self._by_key[task.uid, task.global_step, task.rollouts[0]]

    async def open(self, lease: Lease) -> JsonDict | None:
        """Open the session of a new lease; return the access to it, or None when no episode waits for it."""
        found = self._by_key.get((lease.uid, lease.global_step, lease.rollout_n))
        if found is None:
            return None
        name, link = found
        self._leases[lease.id] = opening = OpenLease(lease.fence, link)
        try:
            access: JsonDict | None = await link.ask("open", offer=name, lease=asdict(lease))
        except WorkerGoneError:  # its episodes end now, and with them the lease
            return None
        if access is not None:
            opening.control_key = str(access["control_key"])
        return access

    async def summaries(self) -> list[JsonDict]:
        """
        Return what the workers say about their sessions, in the order of the leases.

        All are asked at once. Open sessions of a worker that does not answer soon have only an id, and `silent`.
        """
        asked = {link: link.list_sessions() for link in self._workers.values()}
        if asked:
            await asyncio.wait(asked.values(), timeout=_LIST_S)
        found: dict[str, JsonDict] = {}
        for answer in asked.values():
            if answer.done() and not isinstance(answer.exception(), WorkerGoneError):
                found |= {each["id"]: each for each in _read_answer(answer.result())}
        for name, lease in self._leases.items():
            is_silent = lease.link in asked and not asked[lease.link].done()
            if is_silent and lease.control_key is not None and name not in self._ended:
                found[name] = {"id": name, "status": "silent"}
        return [found[name] for name in self._leases if name in found]

    def lose(self, lease: Lease) -> None:
        """Tell the worker of a lease that it has expired."""
        found = self._by_key.get((lease.uid, lease.global_step, lease.rollout_n))
        if found is not None:
            found[1].tell("lost", offer=found[0], lease=asdict(lease))
        self.note_end(lease.id)

    async def ask(self, lease_id: str, kind: str, **body: object) -> Any:
        """Ask the worker of a lease's session; None if nobody knows the session. Errors as for `WorkerLink.ask`."""
        lease = self._leases.get(lease_id)
        return None if lease is None else await lease.link.ask(kind, session=lease_id, **body)

    def find(self, lease_id: str) -> OpenLease | None:
        """Return a lease that has a session; None for an unknown lease, and for one of a worker that is gone."""
        return self._leases.get(lease_id)

    def note_end(self, lease_id: str) -> None:
        """Note that a lease has ended; the oldest of many ended ones is forgotten."""
        if lease_id in self._leases:
            self._ended[lease_id] = None
        while len(self._ended) > _MAX_ENDED:
            self._leases.pop(self._ended.popitem(last=False)[0], None)


def _read_answer(answer: object) -> Any:
    if isinstance(answer, dict) and "error" in answer:
        raise RequestError(*answer["error"])
    return answer
