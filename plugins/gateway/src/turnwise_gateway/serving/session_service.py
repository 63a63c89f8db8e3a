"""
Opens the sessions that are asked for at the control port of `turnwise gateway serve`.

A request for a session submits a task to the run. Its episode opens the session, tells the request, and lasts until
the session is scored or ended. Everything here happens on the event loop of the run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise import Episode, EpisodeResult, Task
from turnwise.errors import Owner
from turnwise.types import JsonDict
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.control.atif import show_session
from turnwise_gateway.control.control_server import RequestError, refusal
from turnwise_gateway.control.scores import Verdict
from turnwise_gateway.control.session_table import SessionTable, score_session
from turnwise_gateway.host import RunningServer
from turnwise_gateway.serving.session_log import SessionLog
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session, Spawn

_MAX_ENDED: Final = 1024
"""Sessions that are over and that the control port still shows."""

Key = tuple[str, int]
"""A task's uid and the number of a session for it."""
Submit = Callable[[Task, int], object]


@define(eq=False)
class SessionService:
    """
    The `ControlledSessions` of `turnwise gateway serve`.

    Attributes:
        server: of the agents' port; it listens before the first session is asked for.
        capacity: most sessions that are open at once.
        submit: starts the episode of a task with a number; set before the first request.
        numbers: of the next session for each uid.
        make_session: returns the session of an episode.
        make_name: returns the name of the next session.
        keep_requests: folder for a file with the requests of each session; None keeps none.
        log: of the sessions, for a process that serves the folder after a kill; None writes none.
    """

    server: RunningServer
    capacity: int
    submit: Submit = field(init=False)
    numbers: Counter[str] = field(factory=Counter)
    make_session: Callable[[Episode, SessionParts, str, Spawn], Session] = Session
    make_name: Callable[[], str] = lambda: secrets.token_hex(8)
    keep_requests: Path | None = None
    log: SessionLog | None = None
    _expected: dict[Key, asyncio.Future[AgentSession]] = field(factory=dict, init=False)
    _sessions: SessionTable = field(factory=lambda: SessionTable(_MAX_ENDED), init=False)
    _by_key: dict[Key, AgentSession] = field(factory=dict, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)
    _is_closed: bool = field(default=False, init=False)

    async def request(self, task: Task) -> AgentSession:
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
    def open(self, episode: Episode, parts: SessionParts, calls: asyncio.TaskGroup) -> Iterator[AgentSession]:
        """Open the session of an episode inside the `with` statement, and tell the request for it."""
        key = episode.task.uid, episode.rollout_n
        name = self.make_name()
        make = partial(self.make_session, episode, parts, name)
        session = self._by_key[key] = AgentSession.open(name, self.server, make, calls, self.keep_requests)
        if self.log is not None:
            self.log.note_opened(session)
        self._sessions.add(session)
        self._counts["opened"] += 1
        if (opening := self._expected.pop(key, None)) is not None and not opening.done():
            opening.set_result(session)
        try:
            yield session
        finally:
            session.close()

    def note_result(self, result: EpisodeResult) -> None:
        """Note the end of an episode, which is in the file of results."""
        key = result.task.uid, result.rollout_n
        self._counts[str(result.status)] += 1
        if (opening := self._expected.pop(key, None)) is not None and not opening.done():
            reason = result.fault.message if result.fault else "the episode ended"
            # A row that no episode can run is the fault of the request.
            status = 400 if result.fault and result.fault.owner == "data" else 503
            opening.set_exception(RequestError(status, "not_opened", f"the session was not opened: {reason}"))
        session = self._by_key.pop(key, None)
        if session is None:
            return
        fault = result.fault and {"owner": result.fault.owner, "message": result.fault.message}
        session.outcome = {
            "uid": result.uid,
            "status": str(result.status),
            "reward": result.reward,
            "fault": fault,
            "num_records": len(result.trajectories),
        }
        session.written.set()
        if self.log is not None:
            self.log.note_ended(session.id)

    def find_key(self, session_id: str) -> str | None:
        session = self._sessions.find(session_id)
        return None if session is None else session.control_key

    async def list(self) -> JsonDict:
        return {"stats": self.stats(), "sessions": self._sessions.summaries()}

    async def show(self, session_id: str, form: str) -> JsonDict:
        return show_session(self._find(session_id), form)

    async def score(self, session_id: str, body: dict[str, Any]) -> Verdict:
        # The end of the session is all that its episode waits for.
        return score_session(self._find(session_id), body)[0]

    async def fail(self, session_id: str, owner: Owner, reason: str) -> Verdict:
        return self._find(session_id).fail(owner, reason)

    async def end(self, session_id: str) -> JsonDict:
        """End a session, and wait until its episode is in the file of results; return it as JSON."""
        session = self._find(session_id)
        session.end()
        await session.written.wait()
        return show_session(session)

    def _find(self, session_id: str) -> AgentSession:
        session = self._sessions.find(session_id)
        if session is None:
            raise refusal(Verdict.UNKNOWN, "session")
        return session

    def stats(self) -> dict[str, int]:
        """Return the number of open sessions, of all that were opened, and of ended ones by status."""
        return {"open": len(self._by_key), **self._counts}

    def close(self) -> None:
        """Open no further session."""
        self._is_closed = True


def _end_abandoned(opening: asyncio.Future[AgentSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().fail("infra", "the client that opened the session left before it had the key")
