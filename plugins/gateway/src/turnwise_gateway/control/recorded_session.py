"""Sessions as a control port sees them: delivered turns as a transcript, and scores from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from attrs import define, field

from turnwise_gateway.calls import DeliveredTurn
from turnwise_gateway.control.attempt import Attempted
from turnwise_gateway.control.scores import ScoreBoard
from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.session.session import Session

A_co = TypeVar("A_co", bound=Attempted, covariant=True)


@define(eq=False)
class RecordedSession(Generic[A_co]):
    """
    A session whose turns and scores the control port shows.

    Attributes:
        names: of the attempt; the session has its id.
        session: answers the calls.
        scores: reported from outside.
    """

    names: A_co
    session: Session
    scores: ScoreBoard = field(factory=ScoreBoard, init=False)

    @property
    def ended(self) -> asyncio.Event:
        """Set at the end; then calls are refused."""
        return self.session.door.ended

    @property
    def transcript(self) -> Sequence[DeliveredTurn]:
        """The turns of its records, each once, in the order in which they were appended."""
        return self.session.transcript

    def end(self) -> None:
        """Refuse further calls and scores."""
        self.session.door.end()
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
        for dialect in DIALECTS:
            turn = turn.removeprefix(dialect.id_prefix)
        if not self.session.deliver(turn):
            return None
        return next((each.reply.id for each in self.transcript if each.reply.id == turn and _has_tokens(each)), None)

    def has_record(self, record: int) -> bool:
        """Return whether a client has read a turn of a record."""
        return record in self._records()

    def _records(self) -> set[int]:
        return {int(turn.reply.provenance["record"]) for turn in self.transcript if _has_tokens(turn)}


def _has_tokens(turn: DeliveredTurn) -> bool:
    """Return whether the turn has a token on which a score can lie."""
    return len(turn.reply.token_ids) > 0
