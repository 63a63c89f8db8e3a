"""
What can be watched: events, and the class that a watcher overrides (in the way of trio's instruments).

Which methods a class overrides is looked at once, when it is added; an event that nobody overrides costs nothing.
Observers may not wait and may not change what they are given. One that raises is switched off and logged once.
"""

from __future__ import annotations

from attrs import frozen

from turnwise.result import EpisodeResult
from turnwise.types import FinishReason, Task


@frozen(kw_only=True)
class RunStarted:
    """A batch of episodes was asked for. `num_episodes` counts every rollout of every task."""

    num_episodes: int
    global_step: int
    validation: bool


@frozen(kw_only=True)
class EpisodeStarted:
    """An episode begins to run."""

    uid: str
    task: Task
    agent_name: str


@frozen(kw_only=True)
class TurnFinished:
    """The engine answered: one turn of the model, or a part of one."""

    uid: str
    num_context_tokens: int
    num_new_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    seconds: float


@frozen(kw_only=True)
class ToolFinished:
    """A tool call ended; `error` is set when the model was shown an error."""

    uid: str
    tool: str
    seconds: float
    error: bool
    num_characters: int


@frozen(kw_only=True)
class RewardFinished:
    """An episode was scored."""

    uid: str
    reward: float
    seconds: float


class Observer:
    """
    Base of all observers: override what you want to hear.

    This class serves mostly as documentation; its own methods do nothing and are never called.
    """

    def on_run_started(self, event: RunStarted) -> None:
        """Hear that a batch was asked for."""

    def on_episode_started(self, event: EpisodeStarted) -> None:
        """Hear that an episode begins."""

    def on_turn_finished(self, event: TurnFinished) -> None:
        """Hear what one generate call gave."""

    def on_tool_finished(self, event: ToolFinished) -> None:
        """Hear how a tool call ended."""

    def on_reward_finished(self, event: RewardFinished) -> None:
        """Hear an episode's score."""

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Hear the result of an episode, of every status."""
