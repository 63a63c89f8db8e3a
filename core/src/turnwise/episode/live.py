"""
A running episode, as its agent and its reward see it.

All waits of an agent pass through this class (`generate`, `call_tool`, `interact`), and so do all tokens that it
appends. So deadlines, budgets and the journal apply to every agent. `turnwise.episode.driver` steps the agent.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from attrs import define, field

from turnwise.episode.containment import ContainedTask
from turnwise.episode.events import EpisodeEvents
from turnwise.episode.journal import Journal
from turnwise.episode.requests import check_result, continue_request, derive_seed, join_turn, locate_turn, name_record
from turnwise.episode.setup import EpisodeContext, Limits, apply_prompt_policy, check_objective
from turnwise.episode.timer import EpisodeTimer
from turnwise.episode.user_session import UserSession
from turnwise.errors import BudgetExhausted, Owner, TrajectoryError, boundary
from turnwise.layout import Objective
from turnwise.record.columns import TokenRecord
from turnwise.record.spec import Counters, EpisodeSpec, RecordedCall, RecordedTurn, TurnPosition
from turnwise.record.trajectory import Path, Trajectory
from turnwise.tools.session import MAX_NAME, ToolSession
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
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


@define(eq=False)
class LiveEpisode:
    """
    The core's `turnwise.protocols.Episode`.

    Attributes:
        spec: which episode.
        limits: its limits.
        context: parts that it shares with other episodes.
        key: name of this attempt, unique in all processes; the ids of its requests and records start with it.
        state: state of the agent.
        messages: the conversation as text.
        memory: the agent's notes, JSON values.
        trajectories: its records; the agent appends to the last one.
        sampled: results of the engine for each record, in order.
        counters: totals for the metrics.
        last_finish: finish reason of the last turn.
        chosen_objective: the agent's choice; None for the default.
        journal: results of the current step.
        tools: its tool sessions; None in a run without tools. The driver sets it.
        user: its session of the simulated user; None in a run without one.
        timer: its deadlines and requests in flight.
        events: emits its events.
        capabilities: of the engine.
    """

    spec: EpisodeSpec
    limits: Limits
    context: EpisodeContext
    key: str = field(factory=lambda: uuid4().hex)
    state: str = State.PENDING
    messages: list[Message] = field(factory=list)
    memory: dict[str, Any] = field(factory=dict)
    trajectories: list[Trajectory] = field(factory=list)
    sampled: list[list[GenerateResult]] = field(factory=list)
    counters: Counters = field(factory=Counters)
    last_finish: FinishReason | None = None
    chosen_objective: Objective | None = None
    journal: Journal = field(factory=Journal)
    tools: ToolSession | None = None
    user: UserSession | None = field(init=False)
    timer: EpisodeTimer = field(init=False)
    events: EpisodeEvents = field(init=False)
    capabilities: Capabilities = field(init=False)
    _num_requests: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        spec, context, saved = self.spec, self.context, self.spec.unfinished
        self.user = None
        if context.interaction is not None:
            self.user = UserSession(context.interaction, spec.task, saved.interaction_notes if saved else None)
        self.timer = EpisodeTimer(self.limits, context)
        self.events = EpisodeEvents(spec, self.key, context.worker, context.observers)
        self.capabilities = context.engine.capabilities  # constant, and an engine may compute it at every access

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
        try:
            return self.trajectories[-1]
        except IndexError:
            raise TrajectoryError("the episode has no record yet: call begin(prompt_ids) first") from None

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def objective(self) -> Objective:
        default = Objective.EXACT if self.capabilities.layouts else Objective.EXPANDED
        return self.chosen_objective or default

    @objective.setter
    def objective(self, value: Objective) -> None:
        if value is not self.objective:
            check_objective(value, self.capabilities, self.trajectories)
            self.chosen_objective = value

    @property
    def remaining_tokens(self) -> int:
        trajectory = self.trajectory
        num_tokens = len(trajectory)
        if trajectory.open_paths:  # they count before they are joined: all of their tokens become part of the record
            num_tokens += sum(map(len, trajectory.open_paths))
        limit = trajectory.num_prompt_tokens + self.limits.response_length
        max_context = self.capabilities.max_context
        if max_context is not None:
            limit = min(limit, max_context)
        return max(0, limit - num_tokens)

    def begin(self, prompt_ids: TokenArray) -> None:
        """Open a record, by the prompt policy; a second call opens a further trajectory of this episode."""
        ids = apply_prompt_policy(prompt_ids, self.task, self.limits)
        if self.trajectories:
            # Closed at once, because `trajectory` and `sampled[-1]` only ever mean the last record.
            self.trajectory.close()
        self.trajectories.append(Trajectory(ids))
        self.sampled.append([])

    async def generate(
        self,
        sampling: SamplingParams | None = None,
        *,
        record: TokenRecord | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        drop_stops: bool = False,
    ) -> GenerateResult:
        self.timer.check_running()
        target = self._resolve(record)
        sampled = self.sampled[-1]  # looked up before the wait, during which another task may open a record
        position = locate_turn(self.trajectories, target)
        turn = saved = self.journal.replay_turn(position)
        if turn is None or not turn.complete:
            bounded = self._bound(sampling or self.spec.sampling, position, max_tokens, stop_token_ids)
            request = self._build_request(target, position, bounded)
            try:
                turn = await self._sample(request, position, saved)
            except BaseException:
                if saved is not None:  # the request failed, but the tokens of the earlier part stay in the record
                    self._append(target, sampled, saved)
                raise
        # No await between the journal and the record: an interrupt finds a turn in both or in neither.
        self.journal.record_turn(turn)
        stop = turn.result.stop_reason
        self._append(target, sampled, turn, drop=drop_stops and stop is not None and stop not in stop_token_ids)
        if not turn.complete:
            # The agent cannot continue from half a turn, so the episode ends here whatever the agent would do.
            await self.timer.wait_for_requests()
            self.timer.activity = "engine"
            raise self.timer.stop_signal()
        return turn.result

    def observe(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        # Not `>`: at least one token of the model must fit behind an observation, or the record would end with it.
        if len(token_ids) >= self.remaining_tokens:
            raise BudgetExhausted(f"an observation of {len(token_ids)} tokens leaves no room for an answer")
        (self.trajectory if record is None else record).add_observation(token_ids)

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        if len(token_ids) > self.remaining_tokens:
            raise BudgetExhausted(f"{len(token_ids)} forced tokens do not fit")
        (self.trajectory if record is None else record).add_forced(token_ids)

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
        return recorded.result

    async def interact(self) -> Reply:
        self.timer.check_running()
        if self.user is None:
            raise TrajectoryError("no interaction is configured: set interaction in the config")
        reply = self.journal.replay_reply()
        if reply is not None:
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
        return ContainedTask(code, owner, name, grace_s, lambda: self.counters.add_extra("left_behind", 1))

    def record_metric(self, name: str, value: float) -> None:
        self.counters.add_extra(name, value)

    def abort(self) -> None:
        """Stop soon; see `EpisodeTimer.abort`."""
        self.timer.abort()

    def _resolve(self, record: TokenRecord | None) -> Trajectory | Path:
        target = self.trajectory if record is None else record
        if not isinstance(target, (Trajectory, Path)):
            raise TypeError(f"expected the trajectory or one of its paths as record, got {target!r}")
        return target

    def _bound(
        self, sampling: SamplingParams, position: TurnPosition, max_tokens: int | None, stop_token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return the sampling parameters of a turn that fits the budget."""
        room = self.remaining_tokens
        if room < 1:
            raise BudgetExhausted("no further token fits the budget")
        bounds = [bound for bound in (room, sampling.max_tokens, max_tokens) if bound is not None]
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_token_ids)))
        # A given seed is kept, although it makes the rollouts of a group equal.
        seed = derive_seed(self.spec, position) if sampling.seed is None else sampling.seed
        return sampling.with_(max_tokens=min(bounds), stop_token_ids=stops, seed=seed)

    def _build_request(
        self, record: Trajectory | Path, position: TurnPosition, sampling: SamplingParams
    ) -> GenerateRequest:
        self._num_requests += 1
        forked = isinstance(record, Path) or record.has_blocks
        return GenerateRequest(
            request_id=f"{self.key}-{self._num_requests}",
            trajectory_id=name_record(self.key, position),
            group_id=self.spec.task.uid,
            token_ids=record.input_ids,
            sampling=sampling,
            layout=record.layout if forked and self.objective is Objective.EXACT else None,
        )

    async def _sample(
        self, request: GenerateRequest, position: TurnPosition, saved: RecordedTurn | None
    ) -> RecordedTurn:
        """Sample a turn, or the rest of a saved one."""
        started = time.perf_counter()
        if saved is None:
            result, seconds = await self._request(request), 0.0
        else:
            rest = continue_request(request, saved.result)
            sampled = None if rest is None else await self._request(rest)
            result, seconds = join_turn(saved.result, sampled, request), saved.seconds
        return RecordedTurn(position=position, result=result, seconds=seconds + time.perf_counter() - started)

    async def _request(self, request: GenerateRequest) -> GenerateResult:
        started = time.perf_counter()
        with boundary("engine", "generate"):
            result = await self.timer.generate(request)
            check_result(result, request, self.capabilities)  # before the record grows
        self.events.emit_turn_finished(request, result, started)
        return result

    def _append(
        self, target: Trajectory | Path, sampled: list[GenerateResult], turn: RecordedTurn, *, drop: bool = False
    ) -> None:
        """Append a turn to a record, without its last token if `drop`."""
        result = turn.result
        # `sampled` gets the whole turn: the check at the end compares it with the record, a dropped token included.
        num_tokens, versions = len(result.token_ids) - drop, result.weight_version
        if not isinstance(versions, int):
            versions = versions[:num_tokens]
        with boundary("engine", "generate"):
            target.add_action(result.token_ids[:num_tokens], result.logprobs[:num_tokens], versions)
        sampled.append(result)
        self.counters.add_turn(turn)
        self.last_finish = result.finish_reason

    async def _run_tool(self, call: ToolCall) -> ToolResult:
        if self.tools is None:
            return ToolResult(text=f"Error: there is no tool {call.name!r}: this run has no tools", error=True)
        running = self.contain(self.tools.call(call), "tool", f"tool {call.name[:MAX_NAME]!r}")
        try:
            return await running.wait(self.limits.tool_call_s)
        except TimeoutError:
            text = f"Error: the tool did not answer within {self.limits.tool_call_s:g} seconds"
            return ToolResult(text=text, error=True)
