"""Transcripts of sessions as JSON, and in the Agent Trajectory Interchange Format (ATIF) of Harbor."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import asdict

from turnwise.media import is_picture_part, read_picture_part
from turnwise.types import JsonDict, Message
from turnwise_gateway.calls import DeliveredTurn, ModelReply
from turnwise_gateway.contents import has_parts
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.session.lineage import find_kinds
from turnwise_result_files.atif import Steps, add_outside_calls, add_step, build_document, token_metrics


def show_session(session: AgentSession, form: str = "json") -> JsonDict:
    """
    Return a session in the form `json` or `atif`.

    As JSON it has its scores, its turns with their token ids by record, the lineage of the records, and the episode
    once that is in a file of results. In ATIF, the record of the first turn is the trajectory; every other record and
    every call to another model is a sub-agent's trajectory. A picture is the name of its file in results.
    """
    return _export_session(session) if form == "atif" else _describe_session(session)


def _describe_session(session: AgentSession) -> JsonDict:
    records: dict[str, list[JsonDict]] = {}
    for number, turn in enumerate(session.transcript):
        described = {"turn": number, "id": turn.reply.id, "dialect": turn.call.dialect, **_tokens(turn.reply)}
        records.setdefault(_record_of(turn), []).append(described)
    episode = session.session.episode
    return {
        "session_id": session.id,
        "task": {"uid": episode.task.uid, "global_step": episode.global_step, "rollout_n": episode.rollout_n},
        "attempt": session.attempt,
        "is_over": session.ended.is_set(),
        "score": session.reported_score(),
        "records": records,
        "lineage": _describe_lineage(session),
        "outside_calls": [asdict(call) for call in session.session.others.noted],
        "episode": session.outcome,
    }


def _describe_lineage(session: AgentSession) -> list[JsonDict]:
    """Return kind, label and parent of each record, as far as they are known."""
    records = session.session.book.records
    return [
        {
            "record": number,
            "kind": each.kind,
            "label": each.label,
            "parent": None if each.parent is None else records.index(each.parent),
            "num_tokens": len(each.record.trajectory),
        }
        for number, each in enumerate(find_kinds(records))
    ]


def _export_session(session: AgentSession) -> JsonDict:
    by_record: dict[str, list[DeliveredTurn]] = {}
    for turn in session.transcript:
        by_record.setdefault(_record_of(turn), []).append(turn)
    name = session.id
    agent: JsonDict = {"name": session.worker or "agent", "version": "", "model_name": session.client.model}
    main, *others = list(by_record.values()) or [[]]
    exported = _export(name, agent, main)
    if others:
        exported["subagent_trajectories"] = [
            _export(f"{name}-{number}", agent, turns) for number, turns in enumerate(others, 1)
        ]
    return add_outside_calls(exported, session.session.others.noted)


def _record_of(turn: DeliveredTurn) -> str:
    return str(turn.reply.provenance.get("record", 0))


def _export(session_id: str, agent: JsonDict, turns: Sequence[DeliveredTurn]) -> JsonDict:
    steps: Steps = []
    for index, turn in enumerate(turns):
        messages = turn.call.messages
        for message in messages if index == 0 else _new_messages(messages):
            add_step(steps, message, is_given=True, content=_content(message))
        add_step(steps, _message(turn.reply))
        steps[-1]["metrics"] = _tokens(turn.reply)
    usages = [turn.reply.usage for turn in turns]
    totals = [
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    ]
    return build_document(session_id, agent, steps, totals=totals)


def _content(message: Message) -> str | None:
    """Return a content with the name of its file for each picture; None for a content without pictures."""
    if not has_parts(message):
        return None
    return "\n".join(
        f"[picture {read_picture_part(part).file_name}]" if is_picture_part(part) else part["text"]
        for part in message["content"]
    )


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
