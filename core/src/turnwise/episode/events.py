"""The events of one episode."""

from __future__ import annotations

import time

from attrs import frozen

from turnwise.events.dispatch import Observers
from turnwise.events.observer import EpisodeStarted, RewardFinished, ToolFinished, TurnFinished, unix_s
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, RecordedCall
from turnwise.types import GenerateRequest, GenerateResult


@frozen
class EpisodeEvents:
    """
    Emits the events of one episode. An event is built only if an observer wants it.

    Times of the arguments are readings of `time.perf_counter`.

    Attributes:
        spec: which episode.
        key: of this attempt.
        worker: name of the worker that runs it.
        observers: receive the events.
    """

    spec: EpisodeSpec
    key: str
    worker: str
    observers: Observers

    def emit_episode_started(self, started: float) -> None:
        if self.observers.heard("on_episode_started"):
            event = EpisodeStarted(
                uid=self.spec.uid,
                task=self.spec.task,
                agent_name=self.spec.agent_name,
                key=self.key,
                global_step=self.spec.global_step,
                validation=self.spec.validation,
                worker=self.worker,
                started_at=unix_s(started),
            )
            self.observers.emit("on_episode_started", event)

    def emit_turn_finished(self, request: GenerateRequest, result: GenerateResult, started: float) -> None:
        if self.observers.heard("on_turn_finished"):
            event = TurnFinished(
                uid=self.spec.uid,
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
            self.observers.emit("on_turn_finished", event)

    def emit_tool_finished(self, call: RecordedCall, started: float) -> None:
        if self.observers.heard("on_tool_finished"):
            event = ToolFinished(
                uid=self.spec.uid,
                tool=call.call.name,
                seconds=call.seconds,
                error=call.result.error,
                num_characters=len(call.result.text),
                key=self.key,
                worker=self.worker,
                started_at=unix_s(started),
            )
            self.observers.emit("on_tool_finished", event)

    def emit_reward_finished(self, reward: float, started: float) -> None:
        if self.observers.heard("on_reward_finished"):
            event = RewardFinished(
                uid=self.spec.uid,
                reward=reward,
                seconds=time.perf_counter() - started,
                key=self.key,
                worker=self.worker,
                started_at=unix_s(started),
            )
            self.observers.emit("on_reward_finished", event)

    def emit_episode_finished(self, result: EpisodeResult) -> None:
        # The result exists in any case, so there is no event to save.
        self.observers.emit("on_episode_finished", result)
