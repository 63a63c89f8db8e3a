"""
What an episode waited for, put together from events: when each turn, tool call and reward began and how long it took.

Events of one episode come one by one, each at its own end; what draws or exports an episode wants them together. Times
are Unix seconds, see `turnwise.observer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from turnwise.observer import EpisodeStarted, Observer, RewardFinished, ToolFinished, TurnFinished
from turnwise.result import EpisodeResult

# Unix seconds as floats are exact to a quarter of a microsecond.
_TICK_S: Final = 1e-6


@define(eq=False)
class EpisodeTimeline:
    """
    One attempt at an episode.

    Attributes:
        start: what it ran, where and when it began.
        turns: the engine's answers, in the order of their ends.
        tools: the tool calls, likewise.
        reward: how it was scored.
        result: how it ended; None for one that never did, because its worker died or the run was cut.
    """

    start: EpisodeStarted
    turns: list[TurnFinished] = field(factory=list)
    tools: list[ToolFinished] = field(factory=list)
    reward: RewardFinished | None = None
    result: EpisodeResult | None = None

    @property
    def ended_at(self) -> float:
        """Unix seconds of the end, or of the last thing that was heard."""
        ends = [turn.started_at + turn.seconds for turn in self.turns]
        ends += [tool.started_at + tool.seconds for tool in self.tools]
        if self.reward is not None:
            ends.append(self.reward.started_at + self.reward.seconds)
        if self.result is not None:
            ends.append(self.start.started_at + self.result.metrics.total_s)
        return max(ends, default=self.start.started_at)

    def rounds(self) -> list[tuple[TurnFinished, list[ToolFinished]]]:
        """
        Return each turn with the tool calls that came of it, by the start of the turns.

        A call belongs to the last turn that had ended when it began.
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
    Puts the events of each episode together; a subclass is told in `on_timeline`.

    It listens in the driver, where the ends of all episodes are heard.
    """

    place = "driver"

    def __init__(self) -> None:
        self._open: dict[str, EpisodeTimeline] = {}
        self._keys: dict[tuple[str, int, bool], str] = {}

    def on_timeline(self, timeline: EpisodeTimeline) -> None:
        """Take an episode that has ended, or that never will."""
        raise NotImplementedError

    def close(self) -> None:
        """Hand over what has not ended."""
        for key in list(self._open):
            self.on_timeline(self._open.pop(key))
        self._keys.clear()

    def on_episode_started(self, event: EpisodeStarted) -> None:
        """Begin; an earlier attempt at the same episode is over."""
        name = (event.uid, event.global_step, event.validation)
        self._hand_over(self._keys.get(name), None)
        self._keys[name] = event.key
        self._open[event.key] = EpisodeTimeline(event)

    def on_turn_finished(self, event: TurnFinished) -> None:
        """Add a turn."""
        self._add(event.key, lambda timeline: timeline.turns.append(event))

    def on_tool_finished(self, event: ToolFinished) -> None:
        """Add a tool call."""
        self._add(event.key, lambda timeline: timeline.tools.append(event))

    def on_reward_finished(self, event: RewardFinished) -> None:
        """Add the reward."""
        if timeline := self._open.get(event.key):
            timeline.reward = event

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Hand the episode over; one that never began has no timeline."""
        key = self._keys.pop((event.uid, event.global_step, event.validation), None)
        self._hand_over(key, event)

    def _add(self, key: str, put: Callable[[EpisodeTimeline], None]) -> None:
        if timeline := self._open.get(key):
            put(timeline)

    def _hand_over(self, key: str | None, result: EpisodeResult | None) -> None:
        timeline = None if key is None else self._open.pop(key, None)
        if timeline is not None:
            timeline.result = result
            self.on_timeline(timeline)
