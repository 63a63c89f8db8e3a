"""
Opens the sessions that are asked for at the control port of `turnwise gateway serve`.

A request for a session submits a task to the run. Its episode opens the session, tells the request, and lasts until
the session is scored or ended. Everything here happens on the event loop of the run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise import Episode, EpisodeResult, Task
from turnwise.errors import InfrastructureError
from turnwise.types import JsonDict
from turnwise_gateway.control.attempt import Attempted
from turnwise_gateway.control.control_server import RequestError
from turnwise_gateway.control.recorded_session import RecordedSession
from turnwise_gateway.host import ModelClient, RunningServer
from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.replay.request_file import log_session
from turnwise_gateway.session.lineage import find_kinds
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session, Spawn

_MAX_ENDED: Final = 1024
"""Sessions that are over and that the control port still shows."""

Key = tuple[str, int]
"""A task's uid and the number of a session for it."""
Submit = Callable[[Task, int], object]


@define(eq=False)
class ServedSession(RecordedSession[Attempted]):
    """
    A session that was opened at the control port.

    Attributes:
        client: for the agent.
        control_key: lets its owner score, read and end this session alone.
        failure: ends the episode as failed.
        outcome: the end of the episode, once it is in the file of results.
        written: set with `outcome`.
    """

    client: ModelClient = field(init=False)
    control_key: str = field(factory=lambda: secrets.token_urlsafe(32), repr=False)
    failure: Exception | None = None
    outcome: JsonDict | None = None
    written: asyncio.Event = field(factory=asyncio.Event)
    _calls: set[asyncio.Task[None]] = field(factory=set)

    def spawn(self, call: Coroutine[Any, Any, None], group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Start to sample a turn, in a group that outlives the call."""
        task = group.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def wait(self) -> None:
        """Wait for the end of the session; calls in flight end with it."""
        try:
            await self.ended.wait()
        finally:
            self.end()
            for call in self._calls:
                call.cancel()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the session and describe its records; a second call does nothing."""
        self.end()
        self.session.close()

    def fail(self, owner: str, reason: str) -> None:
        """End the session as failed, unless it has ended."""
        if not self.ended.is_set():
            self.failure = InfrastructureError(reason) if owner == "infra" else ProgramFailedError(reason)
            self.end()

    def describe_lineage(self) -> list[JsonDict]:
        """Return kind, label and parent of each record, as far as they are known."""
        records = self.session.book.records
        return [
            {
                "record": number,
                "kind": each.kind,
                "label": each.label,
                "parent": None if each.parent is None else records.index(each.parent),
                "num_tokens": len(each.record.trajectory),
            }
            for number, each in enumerate(find_kinds(records))
        ]


@define(eq=False)
class SessionService:
    """
    The sessions of `turnwise gateway serve`.

    Attributes:
        server: of the agents' port; it listens before the first session is asked for.
        capacity: most sessions that are open at once.
        submit: starts the episode of a task with a number; set before the first request.
        numbers: of the next session for each uid.
        make_session: returns the session of an episode.
        keep_requests: folder for a file with the requests of each session; None keeps none.
    """

    server: RunningServer
    capacity: int
    submit: Submit = field(init=False)
    numbers: Counter[str] = field(factory=Counter)
    make_session: Callable[[Episode, SessionParts, str, Spawn], Session] = Session
    keep_requests: Path | None = None
    _expected: dict[Key, asyncio.Future[ServedSession]] = field(factory=dict, init=False)
    _sessions: OrderedDict[str, ServedSession] = field(factory=OrderedDict, init=False)
    _by_key: dict[Key, ServedSession] = field(factory=dict, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)
    _is_closed: bool = field(default=False, init=False)

    async def request(self, task: Task) -> ServedSession:
        """
        Open a session for a task.

        Raises:
            RequestError: too many sessions are open, the gateway ends, or the episode ended before it had a session.
        """
        if self._is_closed:
            raise RequestError(503, "closing", "the gateway ends")
        if len(self._expected) + len(self._by_key) >= self.capacity:
            raise RequestError(429, "overloaded", f"{self.capacity} sessions are open, the most that rollout allows")
        key = task.uid, self.numbers[task.uid]
        self.numbers[task.uid] += 1
        self._expected[key] = opening = asyncio.get_running_loop().create_future()
        self.submit(task, key[1])
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_end_abandoned)  # nobody has the key of the session
            raise

    @contextmanager
    def open(self, episode: Episode, parts: SessionParts, calls: asyncio.TaskGroup) -> Iterator[ServedSession]:
        """Open the session of an episode inside the `with` statement, and tell the request for it."""
        name, key = secrets.token_hex(8), (episode.task.uid, episode.rollout_n)
        uid, step = episode.task.uid, episode.global_step
        names = Attempted(id=name, uid=uid, global_step=step, rollout_n=episode.rollout_n)
        session = self.make_session(episode, parts, name, lambda call: served.spawn(call, calls))
        log_session(session, self.keep_requests)
        served = ServedSession(names, session)
        with self.server.open(name, session) as served.client:
            self._sessions[name] = self._by_key[key] = served
            self._counts["opened"] += 1
            if (opening := self._expected.pop(key, None)) is not None and not opening.done():
                opening.set_result(served)
            try:
                yield served
            finally:
                served.close()

    def note_result(self, result: EpisodeResult) -> None:
        """Note the end of an episode, which is in the file of results."""
        key = result.task.uid, result.rollout_n
        self._counts[str(result.status)] += 1
        if (opening := self._expected.pop(key, None)) is not None and not opening.done():
            reason = result.fault.message if result.fault else "the episode ended"
            # A row that no episode can run is the fault of the request.
            status = 400 if result.fault and result.fault.owner == "data" else 503
            opening.set_exception(RequestError(status, "not_opened", f"the session was not opened: {reason}"))
        served = self._by_key.pop(key, None)
        if served is None:
            return
        fault = result.fault and {"owner": result.fault.owner, "message": result.fault.message}
        served.outcome = {
            "uid": result.uid,
            "status": str(result.status),
            "reward": result.reward,
            "fault": fault,
            "num_records": len(result.trajectories),
        }
        served.written.set()
        while len(self._sessions) - len(self._by_key) > _MAX_ENDED:
            oldest = next(name for name, each in self._sessions.items() if each.outcome is not None)
            del self._sessions[oldest]

    def find(self, session_id: str) -> ServedSession | None:
        return self._sessions.get(session_id)

    def model_name(self) -> str:
        return self.server.model

    def sessions(self) -> list[ServedSession]:
        """Return the sessions, in the order of their opening."""
        return list(self._sessions.values())

    def stats(self) -> dict[str, int]:
        """Return the number of open sessions, of all that were opened, and of ended ones by status."""
        return {"open": len(self._by_key), **self._counts}

    def close(self) -> None:
        """Open no further session."""
        self._is_closed = True


def _end_abandoned(opening: asyncio.Future[ServedSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().fail("infra", "the client that opened the session left before it had the key")
