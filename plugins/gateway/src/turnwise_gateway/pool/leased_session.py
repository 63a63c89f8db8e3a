"""Sessions as the control port sees them: delivered turns as a transcript, scores from outside, and perhaps a lease."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from attrs import define, evolve, field, frozen

from turnwise import ToolCall, ToolResult
from turnwise.types import ToolSchema
from turnwise_gateway.calls import Answer, CallRefusedError, ModelCall, ModelReply, SessionBackend
from turnwise_gateway.pool.scores import ScoreBoard, Target
from turnwise_gateway.pool.store import Attempted, Lease
from turnwise_gateway.pool.task_pool import TaskPool

A_co = TypeVar("A_co", bound=Attempted, covariant=True)


@frozen(eq=False)
class DeliveredTurn:
    """A call and the reply that its client got."""

    call: ModelCall
    reply: ModelReply


@frozen(eq=False)
class _NotedAnswer:
    answer: Answer
    call: ModelCall
    transcript: list[DeliveredTurn]

    @property
    def reply(self) -> ModelReply:
        return self.answer.reply

    def confirm(self) -> None:
        self.answer.confirm()
        # Without the body: the messages are in it once more, for each turn of a conversation.
        call = evolve(self.call, body=b"", growth=None)
        self.transcript.append(DeliveredTurn(call, self.answer.reply))

    def release(self) -> None:
        self.answer.release()


@define(eq=False)
class RecordedSession(Generic[A_co]):
    """
    A `SessionBackend` whose turns and scores the control port shows.

    Attributes:
        names: of the attempt; the session has its id.
        backend: answers the calls.
        scores: reported from outside.
        transcript: delivered turns, in the order of their delivery.
        ended: set at the end; then calls are refused.
    """

    names: A_co
    backend: SessionBackend
    scores: ScoreBoard = field(factory=ScoreBoard, init=False)
    transcript: list[DeliveredTurn] = field(factory=list, init=False)
    ended: asyncio.Event = field(factory=asyncio.Event, init=False)

    async def answer(self, call: ModelCall) -> Answer:
        self._check_open()
        return _NotedAnswer(await self.backend.answer(call), call, self.transcript)

    async def count_tokens(self, call: ModelCall) -> int:
        self._check_open()
        return await self.backend.count_tokens(call)

    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        self._check_open()
        return self.backend.tool_schemas()

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self._check_open()
        return await self.backend.call_tool(call)

    def end(self) -> None:
        """Refuse further calls and scores."""
        self.ended.set()
        self.scores.close()

    def reported_score(self) -> object:
        """Return the scores that were reported, in the form that `ScoreBoard.reported` describes."""
        return self.scores.reported(num_records=self.size("records"), num_turns=self.size("turns"))

    def size(self, kind: Target) -> int:
        """Return the number of things of a kind that can be scored so far."""
        if kind == "records":
            return max((int(turn.reply.facts.get("record", 0)) + 1 for turn in self.transcript), default=0)
        return len(self.transcript) if kind == "turns" else 1

    def _check_open(self) -> None:
        if self.ended.is_set():
            raise CallRefusedError("session_closed", "the session has ended")


@define(eq=False)
class LeasedSession(RecordedSession[Lease]):
    """
    A session whose agent holds a lease, which its calls renew.

    Attributes:
        pool: of the lease.
    """

    pool: TaskPool

    @property
    def lease(self) -> Lease:
        """The lease of the agent."""
        return self.names

    async def answer(self, call: ModelCall) -> Answer:
        self._check_open()
        answer: Answer | None = None
        try:
            async with self.pool.call_of(self.lease):
                # The check is made once more there: the call itself may have found that the lease has ended.
                answer = await super().answer(call)
        except BaseException:
            if answer is not None:  # its client left while the lease was renewed after it
                answer.release()
            raise
        return answer

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self._check_open()
        async with self.pool.call_of(self.lease):
            return await super().call_tool(call)
