"""
Journal of an agent's current step: repeats an interrupted step without running anything twice.

Before each step the journal marks the state of the episode. During the step it records sampled turns, tool results and
replies of the simulated user. A resumed episode starts at the mark, and its first step gets the recorded results
instead of new ones. An agent that depends on its episode alone then repeats the step up to the interrupt.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from attrs import define, evolve, field

from turnwise.episode.records import EpisodeRecords
from turnwise.layout import Objective
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import RecordMark
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import Counters, RecordedCall, RecordedTurn, TurnPosition
from turnwise.types import FinishReason, Message, Reply, ToolCall, copy_json


class ResumableEpisode(Protocol):
    """The state of a live episode that a journal marks, saves and restores."""

    spec: EpisodeSpec
    state: str
    messages: list[Message]
    memory: dict[str, Any]
    records: EpisodeRecords
    counters: Counters
    last_finish: FinishReason | None
    reached: ReachedLimit | None
    chosen_objective: Objective | None


class StepMark(NamedTuple):
    """State of an episode at the start of a step; the attributes are as in `UnfinishedEpisode`, `counters` a mark."""

    state: str
    messages: tuple[Message, ...]
    memory: Mapping[str, Any]
    records: tuple[RecordMark, ...]
    counters: tuple[Any, ...]
    last_finish: FinishReason | None
    reached: ReachedLimit | None
    objective: str
    num_reports: int


@define(eq=False)
class Journal:
    """
    Journal of one episode.

    Attributes:
        mark: start of the current step; None before the first one of this part.
        num_steps: number of finished steps, all parts together.
        turns: turns of this step, in the order in which they ended.
        calls: tool calls of this step.
        replies: replies of the simulated user in this step.
    """

    mark: StepMark | None = None
    num_steps: int = 0
    turns: list[RecordedTurn] = field(factory=list)
    calls: list[RecordedCall] = field(factory=list)
    replies: list[Reply] = field(factory=list)
    # Results of an earlier part of the episode, which the first step replays.
    _saved_turns: dict[TurnPosition, deque[RecordedTurn]] = field(factory=dict, init=False)
    _saved_calls: deque[RecordedCall] = field(factory=deque, init=False)
    _saved_replies: deque[Reply] = field(factory=deque, init=False)

    def restore(self, episode: ResumableEpisode) -> None:
        """Set an episode to its saved state and prepare the replay, or set it to its first step."""
        saved = episode.spec.unfinished
        if saved is None:
            episode.messages = list(episode.spec.task.messages)  # a copy: rollouts of a group share the task
            return
        episode.state, episode.last_finish, episode.reached = saved.state, saved.last_finish, saved.reached
        episode.messages, episode.memory = list(saved.messages), copy_json(dict(saved.memory))
        # Copies, because the saved state must survive this part: if its worker dies, another one starts from it again.
        episode.records.entries = [record.rewound() for record in saved.records]
        for record in episode.records.entries:
            record.sampled = record.find_samples()
        episode.counters = Counters(*saved.counters.mark())
        episode.records.reports = list(saved.reports)
        episode.chosen_objective = Objective(saved.objective) if saved.objective else None
        self.num_steps = saved.num_steps
        for turn in saved.turns:
            self._saved_turns.setdefault(turn.position, deque()).append(turn)
        self._saved_calls.extend(saved.calls)
        self._saved_replies.extend(saved.replies)

    def start_step(self, episode: ResumableEpisode) -> None:
        """Mark the start of a step."""
        if self.mark is not None:
            self.num_steps += 1
            # Saved results belong to the first step: a later one that asks the same question needs a new answer.
            for results in (self.turns, self.calls, self.replies, self._saved_calls, self._saved_replies):
                results.clear()
            self._saved_turns.clear()
        # Copies of all that an agent changes in place. Of the records a mark suffices, because they only grow.
        self.mark = StepMark(
            episode.state,
            tuple(episode.messages),
            copy_json(episode.memory),
            tuple([record.mark() for record in episode.records.entries]),  # a generator takes twice as long
            episode.counters.mark(),
            episode.last_finish,
            episode.reached,
            episode.chosen_objective or "",
            len(episode.records.reports),
        )

    def replay_turn(self, position: TurnPosition) -> RecordedTurn | None:
        """Return the saved turn at a position, if there is one; `record_turn` removes it."""
        turns = self._saved_turns.get(position)
        return turns[0] if turns else None

    def record_turn(self, turn: RecordedTurn) -> None:
        """Record a turn, in place of the saved one at its position."""
        if turns := self._saved_turns.get(turn.position):
            turns.popleft()
        self.turns.append(turn)

    def replay_call(self, call: ToolCall) -> RecordedCall | None:
        """Return and record the saved result of an equal tool call, if there is one."""
        if not self._saved_calls:
            return None
        # By content and not by order: calls that run at the same time may come in another order this time.
        key = _call_key(call)
        saved = next((saved for saved in self._saved_calls if _call_key(saved.call) == key), None)
        if saved is not None:
            self._saved_calls.remove(saved)
            self.calls.append(saved)
        return saved

    def replay_reply(self) -> Reply | None:
        """Return and record the next saved reply of the simulated user, if there is one."""
        if not self._saved_replies:
            return None
        self.replies.append(self._saved_replies.popleft())
        return self.replies[-1]

    def save(self, episode: ResumableEpisode) -> UnfinishedEpisode:
        """Return the state at the start of the current step, with all results of the step."""
        earlier = episode.spec.unfinished
        spec = evolve(episode.spec, unfinished=None)
        if self.mark is None:  # interrupted before the first step of this part
            return earlier or UnfinishedEpisode(spec=spec, started=False)
        mark = self.mark
        return UnfinishedEpisode(
            spec=spec,
            state=mark.state,
            messages=mark.messages,
            memory=copy_json(mark.memory),
            # Records that the step opened are left out: it opens them again.
            records=tuple(r.rewound(at) for r, at in zip(episode.records.entries, mark.records, strict=False)),
            # Saved results that the step has not asked for yet are still answers for the next part.
            turns=(*self.turns, *(turn for turns in self._saved_turns.values() for turn in turns)),
            calls=(*self.calls, *self._saved_calls),
            replies=(*self.replies, *self._saved_replies),
            counters=Counters(*mark.counters),
            reports=tuple(episode.records.reports[: mark.num_reports]),
            last_finish=mark.last_finish,
            reached=mark.reached,
            objective=mark.objective,
            num_steps=self.num_steps,
            num_interruptions=1 + (earlier.num_interruptions if earlier else 0),
        )


def _call_key(call: ToolCall) -> str:
    return json.dumps([call.name, call.arguments, call.error, call.raw], sort_keys=True, default=str)
