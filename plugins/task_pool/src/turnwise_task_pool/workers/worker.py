"""
A worker's end of the pool in the driver.

The worker offers its episodes, and asks for what the driver wants of it: to open the session of a lease, and to score,
end, show or list sessions. The answers go back with the next question, so they have the order in which things happened.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import structlog
from attrs import asdict, define, field

from turnwise import Episode
from turnwise.errors import InfrastructureError
from turnwise.protocols import ServiceClient
from turnwise_gateway.agents.agent import show_task
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.control.atif import show_session
from turnwise_gateway.control.control_server import RequestError
from turnwise_gateway.control.scores import ControlError, Verdict
from turnwise_gateway.control.session_table import SessionTable, score_session
from turnwise_gateway.host import RunningServer
from turnwise_gateway.session.parts import SessionParts
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.pool.store import Lease, PoolResult, State
from turnwise_task_pool.workers.attempts import Offer

Plain = dict[str, Any]
"""Plain data of a call."""
MAX_ENDED: Final = 128
"""Sessions that are over and that the control port still shows."""


@define(eq=False)
class PoolWorker:
    """
    The episodes and sessions of an event loop, as the pool in the driver sees them.

    Attributes:
        service: the pool.
        server: of the agents' port, which listens.
        config: of the agent.
    """

    service: ServiceClient
    server: RunningServer
    config: PoolConfig
    _name: str = field(factory=lambda: secrets.token_hex(8), init=False)
    _offers: dict[str, Offer] = field(factory=dict, init=False)
    _sessions: SessionTable = field(factory=lambda: SessionTable(MAX_ENDED), init=False)
    _tasks: list[asyncio.Task[None]] = field(factory=list, init=False)
    _error: InfrastructureError | None = field(default=None, init=False)

    async def open(self) -> None:
        """Join the pool; `InfrastructureError` if the driver cannot reach the agents' port."""
        await self.service.call("join", worker=self._name, url=self.server.url)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._attend()), loop.create_task(self._exchange())]

    async def close(self) -> None:
        """Leave the pool."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def offer(self, episode: Episode, parts: SessionParts, calls: asyncio.TaskGroup) -> AsyncIterator[Offer]:
        """Let agents lease an episode inside the `async with` statement; their calls run in a task group."""
        offer = Offer(episode, parts, self.server, calls, self.config, self._renew, self._result)
        # Known here before it is known to the pool, which may hand it out before it has replied.
        self._offers[name := secrets.token_hex(8)] = offer
        try:
            if self._error is not None:
                raise self._error
            await self.service.call("offer", worker=self._name, name=name, task=_describe(episode))
            yield offer
        finally:
            del self._offers[name]
            offer.close()
            with suppress(InfrastructureError):  # the driver has ended, and with it every offer
                await self.service.call("withdraw", worker=self._name, name=name)

    async def _attend(self) -> None:
        """Keep a call open: the driver sees by its end that this worker is gone."""
        await self._unless_lost(self.service.call("attend", worker=self._name))

    async def _exchange(self) -> None:
        await self._unless_lost(self._answer_questions())

    async def _unless_lost(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it is, no agent can reach the episodes any more
            self._lose(InfrastructureError(f"the task pool in the driver is gone: {error}"))

    async def _answer_questions(self) -> None:
        answers: list[list[object]] = []
        while True:
            questions = await self.service.call("exchange", worker=self._name, answers=answers)
            # No await among them: a session that was opened is known before it can be ended.
            answers = [[number, self._answer(kind, body)] for number, kind, body in questions]

    def _lose(self, error: InfrastructureError) -> None:
        if self._error is None:
            structlog.get_logger().warning("task pool lost", reason=str(error))
            self._error = error
            for offer in self._offers.values():
                offer.attempts.put_nowait(error)
            self._sessions.end()

    async def _renew(self, lease: Lease) -> bool:
        verdict: str = await self.service.call("renew", lease_id=lease.id, fence=lease.fence)
        return verdict == Verdict.ACCEPTED

    async def _result(self, lease: Lease) -> PoolResult | None:
        found: Plain | None = await self.service.call("result", lease=asdict(lease))
        return None if found is None else PoolResult(**{**found, "state": State(found["state"])})

    def _answer(self, kind: str, body: Plain) -> object:
        """Answer a question of the driver; None when the session or the episode is not known any more."""
        try:
            if kind in ("open", "lost"):
                return self._open(body["offer"], Lease(**body["lease"]), is_lost=kind == "lost")
            if kind == "list":
                return self._sessions.summaries()
            answers: Any = {"end": _end, "score": _score, "show": show_session}
            session = self._sessions.find(body.pop("session"))
            return None if session is None else answers[kind](session, **body)
        except RequestError as error:
            return {"error": [error.status, error.code, error.message]}
        except ControlError as error:
            return {"error": [400, "invalid", str(error)]}
        except Exception as error:  # noqa: BLE001 - the other agents of this worker need the next answers
            structlog.get_logger().exception("a control request failed", error=str(error))
            return {"error": [500, "failed", "the server failed"]}

    def _open(self, name: str, lease: Lease, *, is_lost: bool) -> Plain | None:
        """Open the session of a lease; one that expired without a session gets it, since its episode waits for it."""
        offer = self._offers.get(name)
        leased = None if offer is None else offer.open(lease)
        if leased is not None:
            self._sessions.add(leased)
        if is_lost and (session := self._sessions.find(lease.id)) is not None:
            session.end()
        return None if leased is None or is_lost else leased.describe_access()


def _end(session: AgentSession, score: object = None, metrics: Mapping[str, float] | None = None) -> Plain:
    """End a session; return the score and the metrics of its lease's end and of the reports before it."""
    reported = session.reported_score()
    if None not in (reported, score) and reported != score:
        return {"verdict": Verdict.CONFLICT}
    session.end()  # before anything waits, so no score comes in between and is lost
    return {"score": reported if score is None else score, "metrics": {**session.scores.metrics, **(metrics or {})}}


def _score(session: AgentSession, report: Plain) -> Plain:
    verdict, is_whole = score_session(session, report)
    return _end(session) if is_whole else {"verdict": verdict}


def _describe(episode: Episode) -> Plain:
    """Return an episode as a task, without the ground truth: an agent must not read the answer."""
    return {
        "uid": episode.task.uid,
        "validation": episode.validation,
        "global_step": episode.global_step,
        "rollout_n": episode.rollout_n,
        "content": {**show_task(episode.task), "validation": episode.validation},
    }
