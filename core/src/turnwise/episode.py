"""
A running episode: what an agent holds while it steps, and the guard of budgets and deadlines.

Everything that waits goes through here (`generate`, `call_tool`, `interact`), and everything that is appended passes
the budget here. Who steps the agent, and what becomes of the episode, is `turnwise.driver`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from attrs import define, field

from turnwise.accounts import Speaker, count_call, count_turn
from turnwise.episode_setup import (
    Limits,
    Services,
    add_sampled,
    fitting_prompt,
    layout_of,
    refuse_objective,
)
from turnwise.episode_spec import Counters, EpisodeSpec, KeptCall, KeptReply, KeptTurn, TurnPlace
from turnwise.errors import (
    BudgetExhausted,
    DeadlineExceeded,
    EpisodeAborted,
    Owner,
    TrajectoryError,
    boundary,
)
from turnwise.journal import Journal
from turnwise.layout import Objective
from turnwise.protocols import Reply
from turnwise.record import TokenRecord
from turnwise.tool_session import ToolSession, begun
from turnwise.trajectory import Path, Trajectory
from turnwise.turns import continued, joined, refuse_overlong, request_seed
from turnwise.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    SamplingParams,
    State,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
)


@define(eq=False)
class LiveEpisode:
    """
    The core's `turnwise.protocols.Episode`.

    Attributes:
        spec: which episode.
        limits: what it may use.
        services: what it shares with others.
        tools: its sessions of the configured tools; set by the driver.
        state: of the agent's machine.
        trajectories: every record begun, the last one being `trajectory`.
        sampled: the engine's answers for each record, in order.
        last_finish: why the last turn stopped.
        journal: what came of the current step.
        activity: whose code is being waited for.
    """

    spec: EpisodeSpec
    limits: Limits
    services: Services
    tools: ToolSession | None = None
    state: str = State.PENDING
    messages: list[Message] = field(factory=list)
    memory: dict[str, Any] = field(factory=dict)
    trajectories: list[Trajectory] = field(factory=list)
    sampled: list[list[GenerateResult]] = field(factory=list)
    counters: Counters = field(factory=Counters)
    journal: Journal = field(factory=Journal)
    last_finish: FinishReason | None = None
    activity: Owner = "agent"
    key: str = field(factory=lambda: uuid4().hex)
    aborting: bool = False
    interaction_session: Any = None
    interaction_open: bool = False
    chosen_objective: Objective | None = None
    _timeout: asyncio.Timeout | None = None
    _episode_deadline: float = float("inf")
    _turn_deadline: float = float("inf")
    _in_flight: set[str] = field(factory=set)
    _answered: asyncio.Event = field(factory=asyncio.Event)
    _num_requests: int = 0

    @property
    def task(self) -> Task:
        """The row that it runs."""
        return self.spec.task

    @property
    def uid(self) -> str:
        """The task's `uid` and the number of the rollout."""
        return f"{self.spec.task.uid}/{self.spec.rollout_n}"

    @property
    def rollout_n(self) -> int:
        """Which of its group's episodes this is, from 0."""
        return self.spec.rollout_n

    @property
    def global_step(self) -> int:
        """Training step that asked for it."""
        return self.spec.global_step

    @property
    def validation(self) -> bool:
        """Whether it samples with the validation parameters."""
        return self.spec.validation

    @property
    def trajectory(self) -> Trajectory:
        """The token record that is being written."""
        if not self.trajectories:
            raise TrajectoryError("the episode has no record yet: call begin(prompt_ids) first")
        return self.trajectories[-1]

    @property
    def sampling(self) -> SamplingParams:
        """The run's parameters for this episode."""
        return self.spec.sampling

    @property
    def objective(self) -> Objective:
        """Exact where the engine takes layouts, unless an agent chose otherwise."""
        chosen = Objective.EXACT if self.services.engine.capabilities.layouts else Objective.EXPANDED
        return self.chosen_objective or chosen

    @objective.setter
    def objective(self, value: Objective) -> None:
        if value is not self.objective:
            refuse_objective(value, self.services.engine.capabilities, self.trajectories)
            self.chosen_objective = value

    @property
    def _speaker(self) -> Speaker:
        return Speaker(self.uid, self.key, self.services.worker)

    @property
    def remaining_tokens(self) -> int:
        """Response tokens that still fit the budget and the engine's context, open paths counted in."""
        trajectory = self.trajectory
        in_paths = sum(map(len, trajectory.open_paths))
        room = self.limits.response_length - trajectory.num_response_tokens - in_paths
        max_context = self.services.engine.capabilities.max_context
        if max_context is not None:
            room = min(room, max_context - len(trajectory) - in_paths)
        return max(0, room)

    # What the agent calls

    def begin(self, prompt_ids: TokenArray) -> None:
        """Open a record, by the prompt policy; a second call opens a further trajectory of this episode."""
        ids = fitting_prompt(prompt_ids, self.task, self.limits)
        if self.trajectories:
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
        """Let the model continue and append what it sampled; see `turnwise.protocols.Episode`."""
        target = self.trajectory if record is None else record
        sampled, place = self.sampled[-1], self._place(target)
        turn = kept = self.journal.kept_turn(place)
        if turn is None or not turn.whole:
            request = self._request(target, sampling or self.spec.sampling, max_tokens, stop_token_ids)
            try:
                turn = await self._sample(request, place, kept)
            except BaseException:
                if kept is not None:  # what the part before the cut sampled is not lost with the rest
                    self._append(target, sampled, kept)
                raise
        self.journal.note_turn(turn)
        stop = turn.result.stop_reason
        self._append(target, sampled, turn, dropped=drop_stops and stop is not None and stop not in stop_token_ids)
        if not turn.whole:
            await self._others_answered()
            self.activity = "engine"
            raise self.why_stopped()
        return turn.result

    def observe(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append an observation behind which the model can still answer, or end the episode as truncated."""
        if len(token_ids) >= self.remaining_tokens:
            raise BudgetExhausted(f"an observation of {len(token_ids)} tokens leaves no room for an answer")
        (self.trajectory if record is None else record).add_observation(token_ids)

    def force(self, token_ids: TokenArray, *, record: TokenRecord | None = None) -> None:
        """Append forced tokens, or end the episode as truncated when they do not fit."""
        if len(token_ids) > self.remaining_tokens:
            raise BudgetExhausted(f"{len(token_ids)} forced tokens do not fit")
        (self.trajectory if record is None else record).add_forced(token_ids)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Run one tool call under its deadline; what goes wrong becomes a result with `error`."""
        kept = self.journal.kept_call(call)
        if kept is None:
            started = time.perf_counter()
            with self._waiting_for("tool"), boundary("tool", f"tool {call.name!r}"):
                result = await self._run_tool(call)
            kept = KeptCall(call=call, result=result, seconds=time.perf_counter() - started)
            self.journal.calls.append(kept)
            observers = self.services.observers
            if observers.heard("on_tool_finished"):
                observers.emit("on_tool_finished", self._speaker.tool_finished(kept, started))
        count_call(self.counters, kept)
        return kept.result

    async def interact(self) -> Reply:
        """Ask the configured user simulator for its answer to `messages`."""
        interaction = self.services.interaction
        if interaction is None:
            raise TrajectoryError("no interaction is configured: set interaction in the config")
        if kept := self.journal.kept_reply():
            return Reply(content=kept.content, should_terminate=kept.should_terminate, reward=kept.reward)
        with self._waiting_for("agent"), boundary("agent", f"interaction {type(interaction).__name__}"):
            if not self.interaction_open:
                notes = self.spec.unfinished.interaction_notes if self.spec.unfinished else None
                self.interaction_session = await begun(interaction, self.task, notes)
                self.interaction_open = True
            reply = await interaction.respond(self.interaction_session, self.messages)
        kept = KeptReply(content=reply.content, should_terminate=reply.should_terminate, reward=reply.reward)
        self.journal.replies.append(kept)
        return reply

    def record_metric(self, name: str, value: float) -> None:
        """Add to a number of this episode's metrics."""
        self.counters.extra[name] = self.counters.extra.get(name, 0.0) + value

    # What the driver calls

    @contextmanager
    def deadlines(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Keep `timeout` at the nearest deadline while the agent steps."""
        self._timeout = timeout
        self._episode_deadline = asyncio.get_running_loop().time() + self.limits.episode_s
        self._set_timer(0.0)
        if self.aborting:
            self.abort()
        try:
            yield
        finally:
            self._timeout = None

    def abort(self) -> None:
        """Stop soon: requests in flight return what they had, anything else that waits is cancelled."""
        self.aborting = True
        if self._timeout is None or self._timeout.expired():
            return
        for request_id in self._in_flight:
            self.services.spawn(self.services.engine.abort(request_id))
        grace = self.limits.abort_grace_s if self._in_flight else 0.0
        self._timeout.reschedule(asyncio.get_running_loop().time() + grace)

    def why_stopped(self) -> EpisodeAborted | DeadlineExceeded:
        """Return the signal that ends the episode after its timer fired or its request was aborted."""
        if self.aborting:
            return EpisodeAborted("the run was asked to stop")
        now = asyncio.get_running_loop().time()
        if now >= self._episode_deadline:
            return DeadlineExceeded(f"the episode took longer than {self.limits.episode_s:g} s")
        if now >= self._turn_deadline:
            return DeadlineExceeded(f"the turn took longer than {self.limits.turn_s:g} s")
        return EpisodeAborted("the engine ended the request")

    # Inside

    def _request(
        self, record: TokenRecord, sampling: SamplingParams, max_tokens: int | None, stop_token_ids: Sequence[int]
    ) -> GenerateRequest:
        context = record.input_ids if isinstance(record, Trajectory | Path) else self.trajectory.input_ids
        room = self.remaining_tokens
        if room < 1:
            raise BudgetExhausted("no token of the model fits any more")
        bounds = [bound for bound in (room, sampling.max_tokens, max_tokens) if bound is not None]
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_token_ids)))
        self._num_requests += 1
        seed = request_seed(self.spec, self._place(record)) if sampling.seed is None else sampling.seed
        return GenerateRequest(
            request_id=f"{self.key}-{self._num_requests}",
            trajectory_id=self._record_id(record),
            group_id=self.task.uid,
            token_ids=context,
            sampling=sampling.with_(max_tokens=min(bounds), stop_token_ids=stops, seed=seed),
            layout=layout_of(record) if self.objective is Objective.EXACT else None,
        )

    def _record_id(self, record: TokenRecord) -> str:
        """Name a record: the episode's key, and behind a slash which further record or path it is."""
        number, trajectory = len(self.trajectories) - 1, self.trajectory
        if isinstance(record, Path):
            return f"{self.key}/{number}.{len(trajectory)}.{record.index}"
        return f"{self.key}/{number}" if number else self.key

    def _place(self, record: TokenRecord) -> TurnPlace:
        path = record.index if isinstance(record, Path) else -1
        return (len(self.trajectories), len(self.trajectory), path, len(record))

    async def _sample(self, request: GenerateRequest, place: TurnPlace, kept: KeptTurn | None) -> KeptTurn:
        """Sample a turn, or the rest of one that was cut."""
        rest = request if kept is None else continued(request, kept.result)
        started, result = time.perf_counter(), None
        if rest is not None:
            with boundary("engine", "generate"):
                result = await self._ask(rest)
                refuse_overlong(result, rest)
            if self.services.observers.heard("on_turn_finished"):
                event = self._speaker.turn_finished(rest, result, started)
                self.services.observers.emit("on_turn_finished", event)
        seconds = time.perf_counter() - started + (kept.seconds if kept else 0.0)
        return KeptTurn(place=place, result=joined(kept.result if kept else None, result, request), seconds=seconds)

    def _append(
        self, target: TokenRecord, sampled: list[GenerateResult], turn: KeptTurn, *, dropped: bool = False
    ) -> None:
        with boundary("engine", "generate"):
            add_sampled(target, turn.result, drop=dropped)
        sampled.append(turn.result)
        count_turn(self.counters, turn)
        self.last_finish = turn.result.finish_reason

    async def _others_answered(self) -> None:
        """Wait for the other paths' requests at an abort: what they had sampled is kept too. The timer bounds it."""
        while self.aborting and self._in_flight:
            await self._answered.wait()

    async def _ask(self, request: GenerateRequest) -> GenerateResult:
        """Wait for the engine; at a deadline ask it to stop first, so that partial turns are kept."""
        loop, engine = asyncio.get_running_loop(), self.services.engine
        self._turn_deadline = loop.time() + self.limits.turn_s
        self._in_flight.add(request.request_id)
        self._answered.clear()
        self._set_timer(self.limits.abort_grace_s)
        deadline = min(self._turn_deadline, self._episode_deadline)
        soft = loop.call_at(deadline, lambda: self.services.spawn(engine.abort(request.request_id)))
        try:
            with self._waiting_for("engine"):
                return await engine.generate(request)
        finally:
            soft.cancel()
            self._in_flight.discard(request.request_id)
            if not self._in_flight:
                self._answered.set()
                self._set_timer(0.0)

    async def _run_tool(self, call: ToolCall) -> ToolResult:
        if self.tools is None:
            return ToolResult(text=f"Error: there is no tool {call.name!r}: this run has no tools", error=True)
        try:
            async with asyncio.timeout(self.limits.tool_call_s) as timeout:
                return await self.tools.call(call)
        except TimeoutError:
            if not timeout.expired():
                raise
            text = f"Error: the tool did not answer within {self.limits.tool_call_s:g} seconds"
            return ToolResult(text=text, error=True)

    def _set_timer(self, grace_s: float) -> None:
        # After an abort or an expiry the timer is not pushed back any more.
        if self._timeout is not None and not self.aborting and not self._timeout.expired():
            self._timeout.reschedule(min(self._turn_deadline, self._episode_deadline) + grace_s)

    @contextmanager
    def _waiting_for(self, owner: Owner) -> Iterator[None]:
        # Left as it is when something is raised: the driver reads whose wait it was.
        self.activity = owner
        yield
        self.activity = "agent"
