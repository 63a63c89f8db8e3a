"""
Transcripts of sessions as JSON, and in the Agent Trajectory Interchange Format (ATIF) of Harbor.

Source: the ATIF specification, version 1.7, https://github.com/laude-institute/harbor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from turnwise.types import JsonDict, Message
from turnwise_gateway.calls import ModelReply
from turnwise_gateway.dialects.strict_json import read_arguments
from turnwise_gateway.pool.leased_session import DeliveredTurn, RecordedSession
from turnwise_gateway.pool.store import Attempted

ATIF_VERSION: Final = "ATIF-v1.7"
LOWEST_LOGPROB: Final = -9999.0
"""Written for a token of probability 0: JSON has no infinite numbers."""


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
    return str(turn.reply.facts.get("record", 0))


def _export(session_id: str, agent: JsonDict, turns: Sequence[DeliveredTurn]) -> JsonDict:
    steps: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        messages = turn.call.messages
        for message in messages if index == 0 else _new_messages(messages):
            _add_message(steps, message)
        steps.append({"step_id": len(steps) + 1, "source": "agent", **_agent_step(turn.reply)})
    usages = [turn.reply.usage for turn in turns]
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session_id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "total_completion_tokens": sum(usage.completion_tokens for usage in usages),
            "total_cached_tokens": sum(usage.cached_tokens for usage in usages),
            "total_steps": len(steps),
        },
    }


def _new_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages behind the last one of the model."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return messages[last + 1 :]


def _add_message(steps: list[dict[str, Any]], message: Message) -> None:
    role, content = message["role"], message.get("content") or ""
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        results.append({"source_call_id": message.get("tool_call_id"), "content": content})
        return
    source = {"assistant": "agent", "system": "system"}.get(role, "user")
    step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": content}
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_call(each["id"], **each["function"]) for each in calls]
    steps.append(step)


def _agent_step(reply: ModelReply) -> dict[str, Any]:
    step: dict[str, Any] = {"message": reply.content, "metrics": _tokens(reply)}
    if reply.reasoning:
        step["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        step["tool_calls"] = [_call(each.id, each.name, each.arguments) for each in reply.tool_calls]
    return step


def _call(id: str, name: str, arguments: str) -> Mapping[str, object]:
    return {"tool_call_id": id, "function_name": name, "arguments": _arguments(arguments)}


def _arguments(text: str) -> object:
    """Return the JSON object of a call, or an object with the text of a malformed one: the format wants an object."""
    found = read_arguments(text)
    return {"raw": text} if found is None else found


def _tokens(reply: ModelReply) -> JsonDict:
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "completion_token_ids": reply.token_ids.tolist(),
        "logprobs": _finite(reply.logprobs.tolist()),
    }


def _finite(values: Iterable[float]) -> list[float]:
    return [value if math.isfinite(value) else LOWEST_LOGPROB for value in values]
