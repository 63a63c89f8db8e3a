"""The routes of a control port that score and show a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from aiohttp import web

from turnwise_gateway.control.atif import describe_session, export_session
from turnwise_gateway.control.attempt import Attempted
from turnwise_gateway.control.control_server import RequestError, json_reply, read_body, read_metrics, tell
from turnwise_gateway.control.recorded_session import RecordedSession
from turnwise_gateway.control.scores import ControlError, ScoreReport, Verdict, check_index, check_number

S_co = TypeVar("S_co", bound=RecordedSession[Attempted], covariant=True)


class SessionFinder(Protocol[S_co]):
    """Finds sessions by their ids."""

    def find(self, session_id: str) -> S_co | None:
        """Return a session, also for a while after its end; None for an unknown one."""

    def model_name(self) -> str:
        """Return the name of the model."""


S = TypeVar("S", bound=RecordedSession[Attempted])


def find_session(service: SessionFinder[S], request: web.Request) -> S:
    """Return the session that a request names; 404 for an unknown one."""
    session = service.find(request.match_info["id"])
    if session is None:
        raise RequestError(404, "unknown", "there is no such session")
    return session


async def score_session(
    session: S, request: web.Request, complete: Callable[[S, float, dict[str, float]], Awaitable[Verdict]]
) -> web.Response:
    """
    Note a score.

    Args:
        session: that is scored.
        request: with the score.
        complete: called with the score of the whole session, which ends it, and with the metrics of all scores.
    """
    body = await read_body(request, {"id", "score", "record", "turn", "metrics"})
    verdict, report = report_score(session, body)
    if is_end(verdict, report):
        verdict = await complete(session, report.score, dict(session.scores.metrics))
    return tell(verdict)


def report_score(session: RecordedSession[Attempted], body: dict[str, Any]) -> tuple[Verdict, ScoreReport]:
    """
    Note a score, and end the session if it is scored as a whole.

    Args:
        session: that is scored.
        body: of the request.

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
    if is_end(verdict, report):
        session.end()
    return verdict, report


def is_end(verdict: Verdict, report: ScoreReport) -> bool:
    """
    Return whether a report is the score of the whole session, which ends it, whoever reports it.

    A report that was cut off half-way may be known to the session alone, so a repeated one ends it too.
    """
    return report.target[0] == "session" and verdict in (Verdict.ACCEPTED, Verdict.REPEATED)


def _find_turn(session: RecordedSession[Attempted], turn: object) -> str:
    """Return the id of the turn that a score names by its id or by the number that the session shows."""
    if not isinstance(turn, str):
        check_index("turn", turn)
    found = session.find_turn(turn) if isinstance(turn, int | str) else None
    if found is None:
        raise RequestError(404, "unknown", f"no client of the session has read a turn {turn!r}")
    return found


def show_session(session: RecordedSession[Attempted], request: web.Request, model: str) -> web.Response:
    """Return the records of a session as JSON, or its transcript in ATIF."""
    if read_form(request) == "atif":
        return json_reply(200, export_session(session, model=model))
    return json_reply(200, describe_session(session))


def read_form(request: web.Request) -> str:
    """Return the form in which a request wants to see a session: `json` or `atif`."""
    form = request.query.get("format", "json")
    if form not in ("json", "atif"):
        raise ControlError(f"'format' must be json or atif: {form!r}")
    return form
