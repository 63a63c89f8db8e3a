"""Sessions as the control port sees them: delivered turns as a transcript, scores from outside, and perhaps a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from attrs import define, field

from turnwise import ToolCall, ToolResult
from turnwise.types import ToolSchema
from turnwise_gateway.calls import Answer, CallRefusedError, DeliveredTurn, ModelCall, ScoredBackend
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.pool.scores import ScoreBoard
from turnwise_gateway.pool.store import Attempted, Lease
from turnwise_gateway.pool.task_pool import TaskPool

A_co = TypeVar("A_co", bound=Attempted, covariant=True)


@define(eq=False)
class RecordedSession(Generic[A_co]):
    """
    A `SessionBackend` whose turns and scores the control port shows.

    Attributes:
        names: of the attempt; the session has its id.
        backend: answers the calls.
        scores: reported from outside.
        ended: set at the end; then calls are refused.
    """

    names: A_co
    backend: ScoredBackend
    scores: ScoreBoard = field(factory=ScoreBoard, init=False)
    ended: asyncio.Event = field(factory=asyncio.Event, init=False)

    @property
    def transcript(self) -> Sequence[DeliveredTurn]:
        """The turns of its records, each once, in the order in which they were appended."""
        return self.backend.transcript

    async def answer(self, call: ModelCall) -> Answer:
        self._check_open()
        return await self.backend.answer(call)

    @property
    def limits(self) -> CallLimits:
        return self.backend.limits

    def note_refusal(self, refusal: CallRefusedError) -> None:
        self.backend.note_refusal(refusal)

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
        return self.scores.reported(num_records=1 + max(self._records(), default=-1))

    def find_turn(self, turn: int | str) -> str | None:
        """
        Return the id by which scores name a turn; None unless a client has read it and it has tokens.

        Args:
            turn: its number in the transcript, or its id; clients see the id behind the prefix of their dialect.
        """
        if isinstance(turn, int):
            turn = self.transcript[turn].reply.id if turn < len(self.transcript) else ""
        turn = turn.removeprefix("chatcmpl-").removeprefix("msg_")
        if not self.backend.deliver(turn):
            return None
        return next((each.reply.id for each in self.transcript if each.reply.id == turn and _has_tokens(each)), None)

    def has_record(self, record: int) -> bool:
        """Return whether a client has read a turn of a record."""
        return record in self._records()

    def _records(self) -> set[int]:
        return {int(turn.reply.facts["record"]) for turn in self.transcript if _has_tokens(turn)}

    def _check_open(self) -> None:
        if self.ended.is_set():
            raise CallRefusedError("session_closed", "the session has ended")


def _has_tokens(turn: DeliveredTurn) -> bool:
    """Return whether the turn has a token on which a score can lie."""
    return len(turn.reply.token_ids) > 0


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
