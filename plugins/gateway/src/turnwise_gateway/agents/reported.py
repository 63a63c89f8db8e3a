"""Brings scores that were reported from outside to the records of the episode, for the reward `reported`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.session.session import Session


def note_score(session: Session, score: object, metrics: Mapping[str, float]) -> None:
    """
    Note score and metrics that were reported from outside.

    Args:
        session: closed, so that no turn follows.
        score: in the form that `ScoreBoard.reported` describes; None for none.
        metrics: numbers for the logs.
    """
    if score is not None:
        session.episode.memory["reported_score"] = _place_score(session, score)
    for name, value in metrics.items():
        session.episode.record_metric(f"agent/{name}", value)


def check_turns(session: Session) -> None:
    """Raise a `ProgramFailedError` for an agent that has read no token of the model: there is nothing to score."""
    if session.has_turn:
        return
    if session.num_calls == 0:
        raise ProgramFailedError("the agent ended without a call of the model")
    if refused := describe_refusal(session):
        raise ProgramFailedError(refused)
    raise ProgramFailedError(f"the agent made {session.num_calls} calls and has no turn of the model")


def describe_refusal(session: Session) -> str:
    """Return a sentence about the last call that was refused; empty if a turn came after it, or there is none."""
    if session.has_turn:
        return "" if session.refused is None else f"the last call was refused: {session.refused.message}"
    refused = session.refused or session.exhausted
    return "" if refused is None else f"no call was served; the last one was refused: {refused.message}"


def _place_score(session: Session, score: object) -> object:
    """Return a score in the form of the reward, which counts all records and turns of the episode."""
    if not isinstance(score, Mapping):
        return score
    episode = session.episode
    # By identity and not by counting: earlier attempts at the episode have left records and turns, in any order.
    numbers = {id(trajectory): number for number, trajectory in enumerate(episode.trajectories)}
    records = [numbers[id(record.trajectory)] for record in session.book.records]
    if "records" in score:
        values = [0.0] * len(numbers)
        for number, value in enumerate(score["records"]):
            values[records[number]] = value
        return {"records": values}
    return {"turns": _place_turns(session, records, episode.turn_records, score["turns"])}


def _place_turns(
    session: Session, records: Sequence[int], turn_records: Sequence[int], scores: Mapping[str, float]
) -> list[float]:
    """Return a score for each turn of the episode; turns without a score have 0."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(turn_records):
        places[record].append(place)
    values = [0.0] * len(turn_records)
    for turn in session.transcript:
        if len(turn.reply.token_ids):  # others are no turns of the episode
            place = places[records[turn.reply.provenance["record"]]].pop(0)
            values[place] = scores.get(turn.reply.id, 0.0)
    return values
