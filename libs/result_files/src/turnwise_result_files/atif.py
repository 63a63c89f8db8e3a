"""
Documents in the Agent Trajectory Interchange Format (ATIF) of Harbor.

Source: the models of version 1.7 in https://github.com/laude-institute/harbor (`harbor.models.trajectories`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from turnwise.record.outside_call import OutsideCall
from turnwise.types import FloatArray, JsonDict, Message, TokenArray
from turnwise_result_files.messages import calls_of, text_of
from turnwise_result_files.outside_calls import read_answer, read_messages
from turnwise_strict_json import read_arguments

ATIF_VERSION: Final = "ATIF-v1.7"
LOWEST_LOGPROB: Final = -9999.0
"""Written for a token of probability 0: JSON has no infinite numbers."""
_SOURCES: Final = {"assistant": "agent", "system": "system", "developer": "system"}

Steps = list[dict[str, Any]]


def add_step(
    steps: Steps, message: Message, *, is_given: bool = False, content: str | list[dict[str, Any]] | None = None
) -> None:
    """
    Add a message as a step; the response of a tool joins the step that called it.

    Args:
        steps: of the conversation so far.
        message: in the form of Chat Completions.
        is_given: the message is part of the task, so a turn in it is not of this model.
        content: of the step, with pictures; None takes the text of the message.
    """
    content = text_of(message) if content is None else content
    if message["role"] == "tool":
        called = next((step for step in reversed(steps) if step["source"] == "agent"), None)
        if called is not None:
            known = {call["tool_call_id"] for call in called.get("tool_calls", ())}
            response: dict[str, object] = {"content": content}
            if message.get("tool_call_id") in known:
                response["source_call_id"] = message["tool_call_id"]
            called.setdefault("observation", {"results": []})["results"].append(response)
            return
    source = _SOURCES.get(str(message["role"]), "user")
    step: dict[str, object] = {"step_id": len(steps) + 1, "source": source, "message": content}
    if source == "agent":
        if message.get("reasoning_content"):
            step["reasoning_content"] = str(message["reasoning_content"])
        if calls := list(calls_of(message)):
            step["tool_calls"] = [_call(*call) for call in calls]
        if is_given:
            step["is_copied_context"] = True
    steps.append(step)


def token_metrics(
    num_prompt_tokens: int, token_ids: TokenArray, logprobs: FloatArray, num_cached_tokens: int | None = None
) -> JsonDict:
    """Return the metrics of a turn: its tokens and the number of those before it."""
    metrics: JsonDict = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(token_ids),
        "completion_token_ids": token_ids.tolist(),
        "logprobs": [value if math.isfinite(value) else LOWEST_LOGPROB for value in logprobs.tolist()],
    }
    return metrics if num_cached_tokens is None else metrics | {"cached_tokens": num_cached_tokens}


def build_document(
    session_id: str, agent: JsonDict, steps: Steps, *, totals: Sequence[int], extra: JsonDict | None = None
) -> JsonDict:
    """
    Return the document of a conversation.

    Args:
        session_id: of the document.
        agent: `name`, `version` and perhaps `model_name`.
        steps: of the conversation.
        totals: prompt tokens, sampled tokens and cached tokens.
        extra: anything else.
    """
    names = ("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens")
    document: JsonDict = {
        "schema_version": ATIF_VERSION,
        "session_id": session_id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {**dict(zip(names, totals, strict=True)), "total_steps": len(steps)},
    }
    return document if extra is None else document | {"extra": extra}


def add_outside_calls(document: JsonDict, calls: Sequence[OutsideCall]) -> JsonDict:
    """
    Return a document with a further trajectory of a sub-agent for each call to another model than the policy.

    All of its steps are copied context, since nothing in it was sampled here. Its `extra` has the place of the call,
    which is the number of turns of the policy before it, and the bodies as they were sent.
    """
    if not calls:
        return document
    earlier: Any = document.get("subagent_trajectories", ())
    name = document["session_id"]
    added = [_export_outside_call(f"{name}-outside-{number}", call) for number, call in enumerate(calls, 1)]
    return document | {"subagent_trajectories": [*earlier, *added]}


def _export_outside_call(session_id: str, call: OutsideCall) -> JsonDict:
    steps: Steps = []
    for message in (*read_messages(call), {"role": "assistant", "content": read_answer(call)}):
        # A result of a tool would join a step of this agent: here it stays a message.
        add_step(steps, message if message["role"] != "tool" else {**message, "role": "user"}, is_given=True)
    agent: JsonDict = {"name": call.model or "model", "version": "", "model_name": call.model}
    sent = {name: getattr(call, name) for name in ("path", "status", "request", "response")}
    return build_document(session_id, agent, steps, totals=(0, 0, 0), extra={"after_turns": call.num_turns, **sent})


def _call(name: str, function: str, arguments: str) -> dict[str, Any]:
    """Return a call; the text of a malformed one becomes an argument, because the format wants an object."""
    found = read_arguments(arguments)
    return {
        "tool_call_id": name,
        "function_name": function,
        "arguments": {"raw": arguments} if found is None else found,
    }
