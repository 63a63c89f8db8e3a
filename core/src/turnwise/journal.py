"""
What came of an agent's current step, so that a step that was cut can be made again without doing anything twice.

Before each step the journal marks where the episode stands, and during it keeps what was sampled, called and answered.
After a cut the step is made again from the mark, and what was kept answers in place of engine, tools and user: an agent
that depends on nothing but its episode takes the same way and goes on where it was.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from turnwise.episode_spec import (
    Counters,
    EpisodeSpec,
    KeptCall,
    KeptReply,
    KeptTurn,
    TurnPlace,
    UnfinishedEpisode,
)
from turnwise.trajectory import Mark, Trajectory
from turnwise.types import FinishReason, Message, ToolCall


@frozen(eq=False)
class StepMark:
    """Where an episode stood when its current step began; the attributes are those of `UnfinishedEpisode`."""

    state: str
    messages: tuple[Message, ...]
    memory: Mapping[str, Any]
    num_records: int
    mark: Mark | None
    counters: Counters
    last_finish: FinishReason | None
    objective: str


@define(eq=False)
class Journal:
    """
    One episode's journal.

    Attributes:
        mark: where the current step began; None before the first.
        num_steps: steps that ended.
        turns: what the engine answered in this step, in the order of arrival.
        calls: tool calls that were answered in it.
        replies: answers of the simulated user.
    """

    mark: StepMark | None = None
    num_steps: int = 0
    turns: list[KeptTurn] = field(factory=list)
    calls: list[KeptCall] = field(factory=list)
    replies: list[KeptReply] = field(factory=list)
    _kept_turns: dict[TurnPlace, deque[KeptTurn]] = field(factory=dict)
    _kept_calls: deque[KeptCall] = field(factory=deque)
    _kept_replies: deque[KeptReply] = field(factory=deque)

    @classmethod
    def of(cls, unfinished: UnfinishedEpisode) -> Journal:
        """Return a journal that answers with what an unfinished episode kept."""
        turns: dict[TurnPlace, deque[KeptTurn]] = {}
        for turn in unfinished.turns:
            turns.setdefault(turn.place, deque()).append(turn)
        return cls(
            num_steps=unfinished.num_steps,
            kept_turns=turns,
            kept_calls=deque(unfinished.calls),
            kept_replies=deque(unfinished.replies),
        )

    def begin_step(self, mark: StepMark) -> None:
        """Begin a step. What was kept and not asked for belongs to the first step alone."""
        if self.mark is not None:
            self.num_steps += 1
            for kept in (self.turns, self.calls, self.replies, self._kept_calls, self._kept_replies):
                kept.clear()
            self._kept_turns.clear()
        self.mark = mark

    def kept_turn(self, place: TurnPlace) -> KeptTurn | None:
        """Return what an earlier part of the episode sampled at this place, if anything; `note_turn` takes it off."""
        turns = self._kept_turns.get(place)
        return turns[0] if turns else None

    def note_turn(self, turn: KeptTurn) -> None:
        """Keep a turn, in place of what an earlier part had of it."""
        if turns := self._kept_turns.get(turn.place):
            turns.popleft()
        self.turns.append(turn)

    def kept_call(self, call: ToolCall) -> KeptCall | None:
        """Take the answer to the same call from an earlier part of the episode, if there is one."""
        if not self._kept_calls:
            return None
        name = _name_of(call)
        kept = next((kept for kept in self._kept_calls if _name_of(kept.call) == name), None)
        if kept is not None:
            self._kept_calls.remove(kept)
            self.calls.append(kept)
        return kept

    def kept_reply(self) -> KeptReply | None:
        """Take the next answer of the simulated user from an earlier part of the episode, if there is one."""
        if not self._kept_replies:
            return None
        self.replies.append(self._kept_replies.popleft())
        return self.replies[-1]

    def cut(self, spec: EpisodeSpec, trajectories: Sequence[Trajectory]) -> UnfinishedEpisode:
        """Return the episode as its step began, with all that came of the step in this part and those before."""
        earlier = spec.unfinished
        plain = evolve(spec, unfinished=None)
        if self.mark is None:
            return earlier or UnfinishedEpisode(spec=plain, began=False)
        marked, left = self.mark, [turn for turns in self._kept_turns.values() for turn in turns]
        records = [each.rewound(each.mark()) for each in trajectories[: marked.num_records]]
        if marked.mark is not None:
            records[-1] = trajectories[marked.num_records - 1].rewound(marked.mark)
        return UnfinishedEpisode(
            spec=plain,
            state=marked.state,
            messages=marked.messages,
            memory=copied(marked.memory),
            trajectories=tuple(records),
            turns=(*self.turns, *left),
            calls=(*self.calls, *self._kept_calls),
            replies=(*self.replies, *self._kept_replies),
            counters=marked.counters.copy(),
            last_finish=marked.last_finish,
            objective=marked.objective,
            num_steps=self.num_steps,
            num_cuts=1 + (earlier.num_cuts if earlier else 0),
        )


def _name_of(call: ToolCall) -> str:
    return json.dumps([call.name, call.arguments, call.error, call.raw], sort_keys=True, default=str)


def copied(value: Any) -> Any:
    """Return JSON values in containers of their own; anything else as it is."""
    if isinstance(value, dict):
        return {key: copied(each) if isinstance(each, dict | list) else each for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each) if isinstance(each, dict | list) else each for each in value]
    return value
