"""
A running episode, as its agent and its reward see it.

All waits of an agent pass through this class (`generate`, `call_tool`, `interact`), and so do all tokens that it
appends. So deadlines, budgets and the journal apply to every agent. `turnwise.episode.driver` steps the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from attrs import define, field, setters
from attrs.validators import instance_of

from turnwise.episode.containment import ContainedTask, Waits
from turnwise.episode.engine_results import check_result
from turnwise.episode.events import EpisodeEvents
from turnwise.episode.journal import Journal
from turnwise.episode.records import EpisodeRecords
from turnwise.episode.requests import (
    OnCut,
    TurnOptions,
    choose_seed,
    name_record,
    request_turn,
    without_last_token,
)
from turnwise.episode.setup import EpisodeContext, Limits, apply_prompt_policy, check_objective
from turnwise.episode.timer import EpisodeTimer
from turnwise.episode.user_session import UserSession
from turnwise.errors import Owner, TrajectoryError, boundary
from turnwise.layout import Objective
from turnwise.record.columns import TokenRecord
from turnwise.record.limit import ReachedLimit, Room
from turnwise.record.lineage import RecordLineage
from turnwise.record.open_columns import add_turn
from turnwise.record.outside_call import OutsideCall
from turnwise.record.pictures import take_pictures
from turnwise.record.spec import EpisodeSpec
from turnwise.record.step_results import Counters, RecordedCall, RecordedTurn, TurnPosition
from turnwise.record.trajectory import Mark, Path, Trajectory
from turnwise.report import Report
from turnwise.tools.session import ToolSession, call_tool, label_tool, open_tool
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Grammar,
    MediaTokens,
    Message,
    Reply,
    SamplingParams,
    State,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
)

T = TypeVar("T")


@define(eq=False, on_setattr=setters.NO_OP)
class LiveEpisode:
    """
    The core's `turnwise.protocols.Episode`.

    Attributes:
        spec, limits: which episode, and its limits.
        context: parts that it shares with other episodes.
        key: name of this attempt, unique in all processes; the ids of its requests and records start with it.
        state, messages, memory: of the agent: its state, the conversation as text, and its notes, JSON values.
        counters: totals for the metrics.
        last_finish: finish reason of the last turn.
        reached: the limit that ended the last turn, or that the agent noted; None when there is none.
        chosen_objective: the agent's choice; None for the default.
        journal: results of the current step.
        tools: its tool sessions; None in a run without tools. The driver sets it.
        waits: its waits for plugin code.
        user: its session of the simulated user; None in a run without one.
        records, events: its records, and what emits its events.
        timer, capabilities: its deadlines and requests in flight, and the capabilities of the engine.
    """

    spec: EpisodeSpec
    limits: Limits
    context: EpisodeContext
    key: str = field(factory=lambda: uuid4().hex)
    state: str = State.PENDING
    messages: list[Message] = field(factory=list, validator=instance_of(list), on_setattr=setters.validate)
    memory: dict[str, Any] = field(factory=dict)
    counters: Counters = field(factory=Counters)
    last_finish: FinishReason | None = None
    reached: ReachedLimit | None = None
    chosen_objective: Objective | None = None
    journal: Journal = field(factory=Journal)
    tools: ToolSession | None = None
    waits: Waits = field(factory=Waits)
    user: UserSession | None = field(default=None, init=False)
    records: EpisodeRecords = field(init=False)
    timer: EpisodeTimer = field(init=False)
    events: EpisodeEvents = field(init=False)
    capabilities: Capabilities = field(init=False)
    _num_requests: int = field(default=0, init=False)
    _busy: set[TokenRecord] = field(factory=set, init=False)  # records with a request in flight
    _samples: dict[TokenRecord, list[RecordedTurn]] = field(factory=dict, init=False)  # that may yet be appended
    _reached: dict[TurnPosition, ReachedLimit] = field(factory=dict, init=False)  # of samples with the reason `length`

    def __attrs_post_init__(self) -> None:
        spec, context, saved = self.spec, self.context, self.spec.unfinished
        if context.interaction is not None:
            self.user = UserSession(context.interaction, spec.task, saved.interaction_notes if saved else None)
        self.timer = EpisodeTimer(self.limits, context)
        self.events = EpisodeEvents(spec, self.key, context.worker, context.observers)
        self.capabilities = context.engine.capabilities  # constant, and an engine may compute it at every access
        self.records = EpisodeRecords(self.limits, self.capabilities.max_context)

    @property
    def task(self) -> Task:
        return self.spec.task

    @property
    def uid(self) -> str:
        return self.spec.uid

    @property
    def rollout_n(self) -> int:
        return self.spec.rollout_n

    @property
    def global_step(self) -> int:
        return self.spec.global_step

    @property
    def validation(self) -> bool:
        return self.spec.validation

    @property
    def trajectory(self) -> Trajectory:
        return self.records.last

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.records.trajectories

    @property
    def turn_records(self) -> Sequence[int]:
        return tuple(self.counters.turn_records)

    @property
    def lineage(self) -> Sequence[RecordLineage]:
        return self.records.lineage

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def objective(self) -> Objective:
        return self.chosen_objective or (Objective.EXACT if self.capabilities.layouts else Objective.EXPANDED)

    @objective.setter
    def objective(self, value: Objective) -> None:
        if value is not self.objective:
            check_objective(value, self.capabilities, self.trajectories)
            self.chosen_objective = value

    @property
    def remaining_tokens(self) -> int:
        return self.records.remaining(self.trajectory)

    @property
    def max_tokens(self) -> int:
        return self.records.max_tokens

    @property
    def max_pictures(self) -> int:
        return self.limits.max_pictures

    def remaining(self, record: TokenRecord) -> int:
        return self.records.remaining(record)

    def begin(self, prompt_ids: TokenArray | MediaTokens, *, seed_name: str = "") -> Trajectory:
        return self.records.open(Trajectory(apply_prompt_policy(prompt_ids, self.task, self.limits)), seed_name)

    def branch(self, record: Trajectory, mark: Mark, *, seed_name: str = "") -> Trajectory:
        return self.records.branch(record, mark, seed_name)

    def close_record(self, record: Trajectory) -> None:
        self.records.entries[self.records.find(record)].close()

    def describe_record(
        self,
        record: Trajectory,
        *,
        kind: str = "main",
        label: str = "",
        parent: Trajectory | None = None,
        trained: bool = True,
    ) -> None:
        self.records.describe(record, kind=kind, label=label, parent=parent, trained=trained)

    async def generate(
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        drop_stops: bool = False,
        grammar: str | None = None,
    ) -> GenerateResult:
        target = self.records.resolve(record)
        options = TurnOptions(sampling or self.sampling, max_tokens, stop_token_ids, grammar=grammar)
        turn = await self._sample_turn(target, options, keeps_parts=True)
        # No await since the journal has the turn: an interrupt finds it in the journal and the record, or in neither.
        stop = turn.result.stop_reason
        self._append(target, turn, drop=drop_stops and stop is not None and stop not in stop_token_ids)
        return await self._complete(turn)

    async def sample(  # noqa: PLR0913 - keywords, each with a default
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], object] | None = None,
        on_cut: OnCut | None = None,
        grammar: str | None = None,
    ) -> GenerateResult:
        options = TurnOptions(sampling or self.sampling, max_tokens, stop_token_ids, stop, on_tokens, on_cut, grammar)
        return await self._complete(await self._sample_turn(self.records.resolve(record), options, keeps_parts=False))

    def append(self, result: GenerateResult, *, record: TokenRecord | None = None) -> None:
        target = self.records.resolve(record)
        place, samples = self.records.locate_turn(target), self._samples.get(target, ())
        turn = next((turn for turn in samples if turn.result is result and turn.position == place), None)
        if turn is None:
            raise TrajectoryError("the result was not sampled for this record, or the record has changed since")
        self._append(target, turn)

    def observe(self, token_ids: TokenArray | MediaTokens, *, record: TokenRecord | None = None) -> None:
        target = self.records.resolve(record)
        # At least one token of the model must fit behind an observation, or the record would end with it.
        self.records.check_room(target, "observation", token_ids, spare=1)
        target.add_observation(token_ids)

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        target = self.records.resolve(record)
        self.records.check_room(target, "forced text", token_ids)
        target.add_forced(token_ids)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self.timer.check_running()
        recorded = self.journal.replay_call(call)
        if recorded is None:
            started = time.perf_counter()
            self.timer.activity = "tool"
            result = await self._run_tool(call)
            self.timer.activity = "agent"
            recorded = RecordedCall(call=call, result=result, seconds=time.perf_counter() - started)
            # Only now: a call that was interrupted has no result, and runs again after a resume.
            self.journal.calls.append(recorded)
            self.events.emit_tool_finished(recorded, started)
        self.counters.add_call(recorded)
        self.records.add_report(recorded.result.report, self.counters)
        return recorded.result

    async def open_tool(self, name: str) -> object:
        return await open_tool(self.tools, name)

    async def interact(self) -> Reply:
        self.timer.check_running()
        if self.user is None:
            raise TrajectoryError("no interaction is configured: set interaction in the config")
        if (reply := self.journal.replay_reply()) is not None:
            return reply
        with boundary("agent", f"interaction {type(self.user.interaction).__name__}"):
            reply = await self.user.respond(self.messages)
        self.journal.replies.append(reply)
        return reply

    def contain(
        self, code: Coroutine[object, None, T], owner: Owner, name: str, *, nests: bool = False
    ) -> ContainedTask[T]:
        """Start plugin code in a separate task; a task that is left behind is counted in the metrics."""
        # Code that waits for another contained task gets time for that task's grace period.
        grace_s = self.limits.abort_grace_s * (2 if nests else 1)
        return ContainedTask(code, owner, name, grace_s, lambda: self.counters.add_extra("left_behind", 1), self.waits)

    def note_limit(self, name: str, value: int) -> None:
        self.reached = self.reached or ReachedLimit.of_agent(name, value)

    def note_outside_call(self, call: OutsideCall) -> None:
        self.records.outside_calls.append(call)

    def note_report(self, report: Report) -> None:
        self.records.add_report(report, self.counters)

    def record_metric(self, name: str, value: float) -> None:
        self.counters.add_extra(name, value)

    def abort(self) -> None:
        self.timer.abort()

    async def _sample_turn(self, target: Trajectory | Path, options: TurnOptions, *, keeps_parts: bool) -> RecordedTurn:
        """Return and journal the next turn of a record; if the rest of a saved one fails, `keeps_parts` appends it."""
        self.timer.check_running()
        if target in self._busy:
            raise TrajectoryError("the record has a request in flight already: a record takes one at a time")
        position = self.records.locate_turn(target)
        turn = saved = self.journal.replay_turn(position)
        room = options.narrow(self.records.find_room(target), self)
        if turn is None or not turn.complete:
            request = self._build_request(target, position, options, room)
            send = partial(self._request, on_cut=options.on_cut if self.capabilities.abort else None)
            self._busy.add(target)
            try:
                turn = await request_turn(request, position, saved, send, self.context.columns)
            except BaseException:
                if saved is not None and keeps_parts:
                    self._note_sample(target, saved)
                    self._append(target, saved)
                raise
            finally:
                self._busy.discard(target)
        self.journal.record_turn(turn)
        self._note_sample(target, turn)
        if turn.result.finish_reason.is_cut:
            self._reached[position] = room.reached(len(turn.result.token_ids))
        return turn

    def _note_sample(self, target: TokenRecord, turn: RecordedTurn) -> None:
        """Count a turn and remember that it may be appended, while the record has not changed."""
        self.counters.add_sample(turn)
        self._samples[target] = [*(s for s in self._samples.get(target, ()) if s.position == turn.position), turn]

    async def _complete(self, turn: RecordedTurn) -> GenerateResult:
        """Return the result of a complete turn; end the episode at an incomplete one."""
        if not turn.complete:
            # The agent cannot continue from half a turn, so the episode ends here whatever the agent would do.
            await self.timer.wait_for_requests()
            self.timer.activity = "engine"
            raise self.timer.stop_signal()
        return turn.result

    def _build_request(
        self, record: Trajectory | Path, position: TurnPosition, turn: TurnOptions, room: Room
    ) -> GenerateRequest:
        forked = isinstance(record, Path) or record.has_blocks
        again = self.counters.unappended.get(str(position), 0) if self.counters.unappended else 0
        seed = choose_seed(self.spec, position, self.records.find_seed_name(position[0] - 1), again, turn.sampling.seed)
        sampling = turn.bound(room, seed, self.capabilities)
        self._num_requests += 1
        return GenerateRequest(
            request_id=f"{self.key}-{self._num_requests}",
            trajectory_id=name_record(self.key, position),
            group_id=self.spec.task.uid,
            token_ids=record.input_ids,
            pictures=take_pictures(record, self.capabilities),
            sampling=sampling,
            layout=record.layout if forked and self.objective is Objective.EXACT else None,
            on_tokens=turn.on_tokens,
            grammar=None if turn.grammar is None else Grammar(text=turn.grammar),
        )

    async def _request(self, request: GenerateRequest, on_cut: OnCut | None) -> GenerateResult:
        started = time.perf_counter()
        with boundary("engine", "generate"):
            result = await self.timer.generate(request, on_cut)
            result = check_result(result, request, self.capabilities, self.context.columns)  # before the record grows
        self.events.emit_turn_finished(request, result, started)
        return result

    def _append(self, target: Trajectory | Path, turn: RecordedTurn, *, drop: bool = False) -> None:
        """Append a turn to a record, without its last token if `drop`."""
        if self.records.locate_turn(target) != turn.position:
            raise TrajectoryError("the record has changed while its turn was sampled")
        result = without_last_token(turn.result) if drop else turn.result
        with boundary("engine", "generate"):
            add_turn(target, result, turn.specs or self.context.columns, constrained=turn.is_constrained)
        self.records.entries[turn.position[0] - 1].sampled.append(result)
        self._samples.pop(target, None)
        self.counters.add_turn(turn)
        self.last_finish, self.reached = result.finish_reason, self._reached.pop(turn.position, None)

    async def _run_tool(self, call: ToolCall) -> ToolResult:
        code = self.contain(call_tool(self.tools, call), "tool", label_tool(call.name))
        try:
            return await code.wait_owning(self.limits.tool_call_s)
        except TimeoutError:
            late = f"Error: the tool did not answer within {self.limits.tool_call_s:g} seconds"
            return ToolResult(text=late, error=True)
