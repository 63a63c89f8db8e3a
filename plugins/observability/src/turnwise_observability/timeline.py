"""
Collects the events of each episode into a timeline of its turns, tool calls and reward.

Each event arrives at the end of its turn or call, mixed with events of other episodes; exporters need all events of
one episode together. Times are Unix seconds, see `turnwise.events.observer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from turnwise.events.observer import EpisodeStarted, Observer, RewardFinished, ToolFinished, TurnFinished
from turnwise.record.result import EpisodeResult

# Unix seconds as floats are exact to a quarter of a microsecond.
_TICK_S: Final = 1e-6


@define(eq=False)
class EpisodeTimeline:
    """
    One attempt at an episode.

    Attributes:
        start: task, worker and start time.
        turns: generate calls in the order of their ends.
        tools: tool calls in the order of their ends.
        reward: the reward, once scored.
        result: the result; None if the episode did not end, because its worker died or the run was stopped.
    """

    start: EpisodeStarted
    turns: list[TurnFinished] = field(factory=list)
    tools: list[ToolFinished] = field(factory=list)
    reward: RewardFinished | None = None
    result: EpisodeResult | None = None

    @property
    def ended_at(self) -> float:
        """Unix seconds of the end; of the last event if the episode did not end."""
        ends = [turn.started_at + turn.seconds for turn in self.turns]
        ends += [tool.started_at + tool.seconds for tool in self.tools]
        if self.reward is not None:
            ends.append(self.reward.started_at + self.reward.seconds)
        if self.result is not None:
            ends.append(self.start.started_at + self.result.metrics.total_s)
        return max(ends, default=self.start.started_at)

    def turns_with_tools(self) -> list[tuple[TurnFinished, list[ToolFinished]]]:
        """
        Return each turn with its tool calls, ordered by the start of the turns.

        A tool call belongs to the last turn that had ended when the call started.
        """
        turns = sorted(self.turns, key=lambda turn: turn.started_at)
        calls: list[list[ToolFinished]] = [[] for _ in turns]
        for tool in self.tools:
            ended = [i for i, turn in enumerate(turns) if turn.started_at + turn.seconds <= tool.started_at + _TICK_S]
            if turns:
                calls[max(ended, default=0)].append(tool)
        return list(zip(turns, calls, strict=True))


class TimelineObserver(Observer):
    """
    Collects the events of each episode and passes the timeline to `end_timeline`, which a subclass implements.

    It listens in the driver, which receives the ends of all episodes.
    """

    place = "driver"

    def __init__(self) -> None:
        self._open: dict[str, EpisodeTimeline] = {}
        self._keys: dict[tuple[str, int, bool], str] = {}

    def end_timeline(self, timeline: EpisodeTimeline) -> None:
        """Handle an episode that has ended, or that never will."""
        raise NotImplementedError

    def close(self) -> None:
        for key in list(self._open):
            self.end_timeline(self._open.pop(key))
        self._keys.clear()

    def on_episode_started(self, event: EpisodeStarted) -> None:
        name = (event.uid, event.global_step, event.validation)
        # A second start means that the worker of the first attempt died, so the first attempt never ends.
        self._complete(self._keys.get(name), None)
        self._keys[name] = event.key
        self._open[event.key] = EpisodeTimeline(event)

    def on_turn_finished(self, event: TurnFinished) -> None:
        self._add(event.key, lambda timeline: timeline.turns.append(event))

    def on_tool_finished(self, event: ToolFinished) -> None:
        self._add(event.key, lambda timeline: timeline.tools.append(event))

    def on_reward_finished(self, event: RewardFinished) -> None:
        if timeline := self._open.get(event.key):
            timeline.reward = event

    def on_episode_finished(self, event: EpisodeResult) -> None:
        # An episode that was aborted before its start has no timeline.
        key = self._keys.pop((event.uid, event.global_step, event.validation), None)
        self._complete(key, event)

    def _add(self, key: str, put: Callable[[EpisodeTimeline], None]) -> None:
        if timeline := self._open.get(key):
            put(timeline)

    def _complete(self, key: str | None, result: EpisodeResult | None) -> None:
        timeline = None if key is None else self._open.pop(key, None)
        if timeline is not None:
            timeline.result = result
            self.end_timeline(timeline)
