"""The sessions of a process, as its control port sees them; how requests score them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from attrs import define, field

from turnwise.types import JsonDict
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.control.control_server import RequestError, read_metrics
from turnwise_gateway.control.scores import ControlError, ScoreReport, Verdict, check_index, check_number


@define(eq=False)
class SessionTable:
    """
    The sessions that are open, and the last ones that are over.

    Attributes:
        max_ended: sessions that are over and still known.
    """

    max_ended: int
    _sessions: OrderedDict[str, AgentSession] = field(factory=OrderedDict, init=False)

    def add(self, session: AgentSession) -> None:
        """Add a session, and forget the oldest ones that are over."""
        self._sessions[session.id] = session
        ended = [name for name, each in self._sessions.items() if each.ended.is_set()]
        for name in ended[: max(0, len(ended) - self.max_ended)]:
            del self._sessions[name]

    def find(self, session_id: str) -> AgentSession | None:
        """Return a session; None for one that is not known, or not any more."""
        return self._sessions.get(session_id)

    def end(self) -> None:
        """End all sessions."""
        for session in self._sessions.values():
            session.end()

    def summaries(self) -> list[JsonDict]:
        """Return a line about each session, in the order of their opening."""
        return [
            {
                "id": each.id,
                "uid": each.session.episode.task.uid,
                "rollout_n": each.session.episode.rollout_n,
                "num_turns": len(each.transcript),
                "status": each.outcome["status"] if each.outcome else "ended" if each.ended.is_set() else "open",
            }
            for each in self._sessions.values()
        ]


def score_session(session: AgentSession, body: dict[str, Any]) -> tuple[Verdict, bool]:
    """
    Note a score, and end the session if it is scored as a whole.

    Args:
        session: that is scored.
        body: of the request.

    Returns:
        The verdict, and whether the session is scored as a whole. A report that was cut off half-way may be known to
        the session alone, so a repeated one counts, too.

    Raises:
        ControlError, RequestError: the body is wrong, or names a turn that the session has not.
    """
    name, score = body.get("id"), body.get("score")
    if not isinstance(name, str):
        raise ControlError("'id' must be a text")
    check_number("score", score)
    report = ScoreReport(
        id=name,
        score=float(body["score"]),
        record=body.get("record"),
        turn=None if body.get("turn") is None else _find_turn(session, body["turn"]),
        metrics=read_metrics(body),
    )
    if report.record is not None and not session.has_record(report.record):
        raise RequestError(404, "unknown", f"the session has no turn in a record {report.record}")
    verdict = session.scores.report(report)
    is_whole = report.target[0] == "session" and verdict in (Verdict.ACCEPTED, Verdict.REPEATED)
    if is_whole:
        session.end()
    return verdict, is_whole


def _find_turn(session: AgentSession, turn: object) -> str:
    """Return the id of the turn that a score names by its id or by the number that the session shows."""
    if not isinstance(turn, str):
        check_index("turn", turn)
    found = session.find_turn(turn) if isinstance(turn, int | str) else None
    if found is None:
        raise RequestError(404, "unknown", f"no client of the session has read a turn {turn!r}")
    return found
