"""Results of a step of an episode, its sampled turns and finished tool calls, and the running totals of the episode."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

from attrs import define, field, fields, frozen

from turnwise.record.column_specs import NO_COLUMNS, ColumnSpec
from turnwise.types import GenerateResult, ToolCall, ToolResult

TurnPosition = tuple[int, int, int, int]
"""
Start of a turn: number of its record, from 1; tokens of that record; index of the path, or -1; tokens of the path, or
again of the record.
"""


@define(eq=False)
class Counters:
    """Running totals of an episode; `turnwise.episode.driver` turns them into `EpisodeMetrics`."""

    llm_s: float = 0.0
    tool_s: float = 0.0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_cached_tokens: int = 0
    tool_reward: float = 0.0
    num_sampled_tokens: int = 0
    num_endings: int = 0
    """Results of tools since the last turn that end the episode."""
    extra: dict[str, float] = field(factory=dict)
    unappended: dict[str, int] = field(factory=dict)
    """Samples that were not appended, by the start of their turn."""
    turn_records: list[int] = field(factory=list)
    """The number of the record of each turn with tokens, from 0, in the order in which they were appended."""
    replicas: list[int] = field(factory=list)
    """The replicas that sampled turns, each once."""

    def add_sample(self, turn: RecordedTurn) -> None:
        self.llm_s += turn.seconds
        self.num_cached_tokens += turn.result.num_cached_tokens
        self.num_sampled_tokens += len(turn.result.token_ids)
        place = str(turn.position)
        self.unappended[place] = self.unappended.get(place, 0) + 1

    def add_turn(self, turn: RecordedTurn) -> None:
        """Count a sample as a turn, when it is appended."""
        self.unappended.pop(str(turn.position), None)
        self.num_endings = 0
        if len(turn.result.token_ids):  # an abort may come before the first token
            self.turn_records.append(turn.position[0] - 1)
            if turn.result.replica not in self.replicas:
                self.replicas.append(turn.result.replica)

    def add_call(self, call: RecordedCall) -> None:
        result = call.result
        self.tool_s += call.seconds
        self.num_tool_calls += 1
        self.num_tool_errors += result.error
        self.num_endings += result.ends_episode
        self.tool_reward += result.reward or 0.0
        for name, value in result.metrics.items():
            self.add_extra(f"tool/{name}", value)

    def add_extra(self, name: str, value: float) -> None:
        """Add to a metric of the agent or a tool."""
        self.extra[name] = self.extra.get(name, 0.0) + value

    def mark(self) -> tuple[Any, ...]:
        """Return copies of the attributes, in their order: `Counters(*mark)` has the totals of this time."""
        containers = (self.extra.copy(), self.unappended.copy(), self.turn_records.copy(), self.replicas.copy())
        return (*_read_totals(self), *containers)


# All but the last four, which are containers.
_read_totals: Final = attrgetter(*[attribute.name for attribute in fields(Counters)[:-4]])


@frozen(kw_only=True, eq=False)
class RecordedTurn:
    """
    A turn that the engine returned within a step.

    Attributes:
        position: start of the turn in the records.
        result: as the engine returned it; finish reason `abort` means that the turn continues after a resume.
        seconds: time that the engine took.
        is_constrained: it was sampled under a grammar.
        specs: declarations of the open columns of the result, as the engine gave them; files of earlier versions lack
            them.
    """

    position: TurnPosition
    result: GenerateResult
    seconds: float = 0.0
    is_constrained: bool = False
    specs: Mapping[str, ColumnSpec] = NO_COLUMNS

    @property
    def complete(self) -> bool:
        return self.result.finish_reason.is_final


@frozen(kw_only=True, eq=False)
class RecordedCall:
    """A finished tool call of a step, and the seconds that it took."""

    call: ToolCall
    result: ToolResult
    seconds: float = 0.0
