"""What an episode's turns and tool calls cost: the counters, and the events that observers hear of them."""

from __future__ import annotations

import time

from attrs import frozen

from turnwise.episode_spec import Counters, KeptCall, KeptTurn
from turnwise.observer import ToolFinished, TurnFinished, unix_s
from turnwise.types import GenerateRequest, GenerateResult


def count_turn(counters: Counters, turn: KeptTurn) -> None:
    """Count one turn of the model, also one that an earlier part of the episode began."""
    counters.llm_s += turn.seconds
    counters.num_turns += len(turn.result.token_ids) > 0
    counters.num_cached_tokens += turn.result.num_cached_tokens


def count_call(counters: Counters, kept: KeptCall) -> None:
    """Count one tool call."""
    result = kept.result
    counters.tool_s += kept.seconds
    counters.num_tool_calls += 1
    counters.num_tool_errors += result.error
    counters.tool_reward += result.reward or 0.0
    for name, value in result.metrics.items():
        counters.extra[f"tool/{name}"] = counters.extra.get(f"tool/{name}", 0.0) + value


@frozen
class Speaker:
    """Whose events they are: the episode's name, the key of this attempt, and the worker that runs it."""

    uid: str
    key: str
    worker: str

    def turn_finished(self, request: GenerateRequest, result: GenerateResult, started: float) -> TurnFinished:
        """Return the event of an engine's answer to a request that was made at `started`."""
        return TurnFinished(
            uid=self.uid,
            num_context_tokens=len(request.token_ids),
            num_new_tokens=len(result.token_ids),
            num_cached_tokens=result.num_cached_tokens,
            finish_reason=result.finish_reason,
            seconds=time.perf_counter() - started,
            key=self.key,
            worker=self.worker,
            replica=result.replica,
            started_at=unix_s(started),
        )

    def tool_finished(self, kept: KeptCall, started: float) -> ToolFinished:
        """Return the event of a tool call that began at `started`."""
        return ToolFinished(
            uid=self.uid,
            tool=kept.call.name,
            seconds=kept.seconds,
            error=kept.result.error,
            num_characters=len(kept.result.text),
            key=self.key,
            worker=self.worker,
            started_at=unix_s(started),
        )
