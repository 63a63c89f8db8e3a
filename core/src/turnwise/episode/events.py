"""The events of one episode."""

from __future__ import annotations

import time
from typing import Any

from attrs import frozen

from turnwise.events.dispatch import Observers
from turnwise.events.observer import EpisodeStarted, RewardFinished, ToolFinished, TurnFinished, unix_s
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec
from turnwise.record.step_results import RecordedCall
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
                task=self.spec.task,
                agent_name=self.spec.agent_name,
                global_step=self.spec.global_step,
                validation=self.spec.validation,
                rollout_n=self.spec.rollout_n,
                **self._describe(started),
            )
            self.observers.emit("on_episode_started", event)

    def emit_turn_finished(self, request: GenerateRequest, result: GenerateResult, started: float) -> None:
        if self.observers.heard("on_turn_finished"):
            event = TurnFinished(
                num_context_tokens=len(request.token_ids),
                num_new_tokens=len(result.token_ids),
                num_cached_tokens=result.num_cached_tokens,
                finish_reason=result.finish_reason,
                seconds=time.perf_counter() - started,
                replica=result.replica,
                **self._describe(started),
            )
            self.observers.emit("on_turn_finished", event)

    def emit_tool_finished(self, call: RecordedCall, started: float) -> None:
        if self.observers.heard("on_tool_finished"):
            event = ToolFinished(
                tool=call.call.name,
                seconds=call.seconds,
                error=call.result.error,
                num_characters=len(call.result.text),
                **self._describe(started),
            )
            self.observers.emit("on_tool_finished", event)

    def emit_reward_finished(self, reward: float, started: float) -> None:
        if self.observers.heard("on_reward_finished"):
            event = RewardFinished(reward=reward, seconds=time.perf_counter() - started, **self._describe(started))
            self.observers.emit("on_reward_finished", event)

    def emit_episode_finished(self, result: EpisodeResult) -> None:
        # The result exists in any case, so there is no event to save.
        self.observers.emit("on_episode_finished", result)

    def _describe(self, started: float) -> dict[str, Any]:
        return {"uid": self.spec.uid, "key": self.key, "worker": self.worker, "started_at": unix_s(started)}
