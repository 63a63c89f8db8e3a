"""Transcripts of sessions as JSON, and in the Agent Trajectory Interchange Format (ATIF) of Harbor."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import JsonDict, Message
from turnwise_gateway.calls import DeliveredTurn, ModelReply
from turnwise_gateway.control.attempt import Attempted
from turnwise_gateway.control.recorded_session import RecordedSession
from turnwise_result_files.atif import Steps, add_step, build_document, token_metrics


def describe_session(session: RecordedSession[Attempted]) -> JsonDict:
    """Return a session as JSON: its attempt, its scores, and its turns with their token ids by record."""
    records: dict[str, list[JsonDict]] = {}
    for number, turn in enumerate(session.transcript):
        described = {"turn": number, "id": turn.reply.id, "dialect": turn.call.dialect, **_tokens(turn.reply)}
        records.setdefault(_record_of(turn), []).append(described)
    names = session.names
    return {
        "session_id": names.id,
        "task": {"uid": names.uid, "global_step": names.global_step, "rollout_n": names.rollout_n},
        "attempt": names.attempt,
        "is_over": session.ended.is_set(),
        "score": session.reported_score(),
        "records": records,
    }


def export_session(session: RecordedSession[Attempted], *, model: str) -> JsonDict:
    """
    Return a session in ATIF.

    The record of the first turn is the trajectory; every other record is a sub-agent's trajectory.
    """
    by_record: dict[str, list[DeliveredTurn]] = {}
    for turn in session.transcript:
        by_record.setdefault(_record_of(turn), []).append(turn)
    name = session.names.id
    agent: JsonDict = {"name": session.names.worker or "agent", "version": "", "model_name": model}
    main, *others = list(by_record.values()) or [[]]
    exported = _export(name, agent, main)
    if others:
        exported["subagent_trajectories"] = [
            _export(f"{name}-{number}", agent, turns) for number, turns in enumerate(others, 1)
        ]
    return exported


def _record_of(turn: DeliveredTurn) -> str:
    return str(turn.reply.provenance.get("record", 0))


def _export(session_id: str, agent: JsonDict, turns: Sequence[DeliveredTurn]) -> JsonDict:
    steps: Steps = []
    for index, turn in enumerate(turns):
        messages = turn.call.messages
        for message in messages if index == 0 else _new_messages(messages):
            add_step(steps, message, is_given=True)
        add_step(steps, _message(turn.reply))
        steps[-1]["metrics"] = _tokens(turn.reply)
    usages = [turn.reply.usage for turn in turns]
    totals = [
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    ]
    return build_document(session_id, agent, steps, totals=totals)


def _new_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages behind the last one of the model."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return messages[last + 1 :]


def _message(reply: ModelReply) -> Message:
    calls = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in reply.tool_calls]
    return {
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": calls,
    }


def _tokens(reply: ModelReply) -> JsonDict:
    return token_metrics(reply.usage.prompt_tokens, reply.token_ids, reply.logprobs, reply.usage.cached_tokens)
