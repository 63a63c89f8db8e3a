"""One attempt of an agent at one task: answers its calls from the episode's engine and keeps them as records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from attrs import define, evolve, field

from turnwise import Episode, GenerateResult, ToolCall, ToolResult
from turnwise.errors import EpisodeEnd
from turnwise.types import ToolSchema
from turnwise_gateway.calls import Answer, CallRefusedError, DeliveredTurn, ModelCall
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.session.call_ids import CallIds
from turnwise_gateway.session.contexts import limit_calls
from turnwise_gateway.session.delivery import KeptTurns, SharedCall, TurnAnswer, do_nothing
from turnwise_gateway.session.door import SessionDoor
from turnwise_gateway.session.field_counter import FieldCounter, count_metric
from turnwise_gateway.session.left_calls import LeftCalls
from turnwise_gateway.session.lineage import describe_records
from turnwise_gateway.session.options import UNTRAINED
from turnwise_gateway.session.other_models import ForwardedCalls
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.records import OpenRecord, SampledTurn, SessionRecords
from turnwise_gateway.session.rendering import LongTextError, Rendering, refusing_depth
from turnwise_gateway.session.replies import ReplyHead
from turnwise_gateway.session.requests import check_request, check_stop, constrain, refuse_grammar
from turnwise_gateway.session.sampler import TurnSampler
from turnwise_gateway.session.tool_calls import ToolRunner
from turnwise_gateway.session.turns import TurnReader
from turnwise_gateway.session.written_calls import find_call_reader
from turnwise_gateway.tree.messages import split_think

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@define(eq=False)
class Session:
    """
    The `SessionBackend` of an episode. All of its methods run on the episode's event loop.

    Attributes:
        episode: that the calls belong to.
        parts: of the run.
        name: of the session, for ids of replies.
        spawn: starts a task in a group that outlives every call.
        limits: of its requests.
        book: its records.
        door: of its calls, with the listeners.
        others: its calls for models of other servers.
        error: ended the session before its agent ended: an engine that failed, or a limit of the episode.
        tools: runs its tool calls.
        exhausted, refused: the last refusal for lack of budget or context, and for another reason; or None.
        num_calls: calls so far, refused ones included.
        transcript: turns that clients have, in the order in which they were appended to the records.
        changed: set when a call starts or ends, and with `ending`.
        ending: set with `error` and `exhausted`, and when further calls are refused.
    """

    episode: Episode
    parts: SessionParts
    name: str
    spawn: Spawn
    limits: CallLimits = field(init=False)
    book: SessionRecords = field(init=False)
    door: SessionDoor = field(init=False)
    others: ForwardedCalls = field(init=False)
    error: Exception | None = field(default=None, init=False)
    tools: ToolRunner = field(init=False)
    exhausted: CallRefusedError | None = field(default=None, init=False)
    refused: CallRefusedError | None = field(default=None, init=False)
    num_calls: int = field(default=0, init=False)
    transcript: list[DeliveredTurn] = field(factory=list, init=False)
    changed: asyncio.Event = field(factory=asyncio.Event, init=False)
    ending: asyncio.Event = field(factory=asyncio.Event, init=False)
    _reader: TurnReader = field(init=False)
    _ids: CallIds = field(init=False)
    _is_closed: bool = field(default=False, init=False)
    _is_over: bool = field(default=False, init=False)
    _rendering: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _count: Callable[..., None] = field(init=False)
    _fields: FieldCounter = field(init=False)
    _num_turns: int = field(default=0, init=False)
    _kept: KeptTurns = field(factory=KeptTurns, init=False)
    _left: LeftCalls = field(init=False)
    _sampler: TurnSampler = field(init=False)

    def __attrs_post_init__(self) -> None:
        parts = self.parts
        self.limits = limit_calls(self.episode, parts.chat, parts.options.picture_hosts)
        self.door = SessionDoor(self.fail, self.changed)
        self._count = partial(count_metric, self.episode)
        self.others = ForwardedCalls(parts.options, self.door, self.episode, self._admit, self._count)
        self._left = LeftCalls(parts.options.finish_left_calls, self.door, self._count)
        self._ids = CallIds(parts.chat)
        split, calls = parts.split or split_think, find_call_reader(parts.parser, parts.chat)
        self.book = SessionRecords(self.episode, parts.chat, parts.options, self._ids, split, calls)
        self.tools = ToolRunner(self.episode, parts.options, self.spawn, self.fail, self.refuse_calls)
        keeps = parts.options.malformed_calls == "call"
        self._reader = TurnReader(
            chat=parts.chat, parser=parts.parser, split=parts.split, settle=parts.settle, keeps_malformed=keeps
        )
        self._fields = FieldCounter(constrains=parts.grammars is not None)
        self._sampler = TurnSampler(self.episode, parts.seed, self._reader, self._left.count_part)

    @property
    def has_turn(self) -> bool:
        """Whether a client has read a token of the model."""
        return any(len(turn.reply.token_ids) for turn in self.transcript)

    @property
    def is_idle(self) -> bool:
        """Whether no call is being answered or delivered."""
        return self.door.num_inside == 0 and self._kept.is_idle

    async def answer(self, call: ModelCall) -> Answer:
        answer: TurnAnswer | None = None
        try:
            async with self.door.holding():
                with self.door.follow(call) as number:
                    turn = await self._take_call(call, number)
                self.door.tell(lambda each: each.on_answer(number, turn))
                note = partial(self.door.tell_outcome, number)
                answer = TurnAnswer(turn, note, self._deliver, lost=self._kept.lose, settled=self.changed.set)
        except BaseException:
            if answer is not None:  # its client left while the hold ended
                answer.release()
            raise
        return answer

    def deliver(self, turn_id: str) -> bool:
        """Take a turn as read because a score has named it, and return whether it is part of a record."""
        self.door.tell(lambda each: each.on_read(turn_id))
        for turn in self._kept.waiting():
            if turn.reply.id == turn_id:
                self._kept.note_read(turn)
                if turn.num_answers:  # else its client has left without it
                    self._deliver(turn)
        return any(turn.reply.id == turn_id for turn in self.transcript)

    def note_refusal(self, call: ModelCall, refusal: CallRefusedError) -> None:
        if not self.door.ended.is_set():
            self.num_calls += 1
            self.door.tell_refused(call, refusal)
            self._note(refusal)
            self.changed.set()

    async def count_tokens(self, call: ModelCall) -> int:
        self.door.check_open()
        check_request(call, self.parts)
        rendering = Rendering(self.parts.chat, self.limits.max_tokens, self._rendering)
        while True:
            try:
                return self._count_tokens(call, rendering)
            except LongTextError as missing:
                await rendering.prepare(missing)

    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        self._check_open()
        return self.parts.tools

    async def call_tool(self, call: ToolCall) -> ToolResult:
        async with self.door.holding():
            self._check_open()
            with self.door.inside():  # an agent that waits for a tool is not idle
                return await self.tools.call(call)

    async def settle(self) -> None:
        """Wait until no call is being answered or delivered."""
        while not self.is_idle:
            self.changed.clear()
            await self.changed.wait()

    def fail(self, error: Exception) -> None:
        """End the session with an error, unless it has one."""
        self.error = self.error or error
        self.ending.set()
        self.changed.set()

    def refuse_calls(self) -> None:
        """Refuse further calls, end all sampling and calls of other servers; still deliver answers on their way."""
        self._is_over, self._left.finishes = True, False
        self.others.end()
        self.ending.set()
        self.changed.set()
        for shared in list(self._kept.in_flight):
            shared.cancel()

    def close(self, *, is_trained: bool = True) -> bool:
        """
        End calls, forget turns that no client has, and describe the records; return False after the first time.

        Args:
            is_trained: train the records of the kinds that the options name, and else none.
        """
        if self._is_closed:
            return False
        self._is_closed = True
        self.door.end()
        self.tools.close()
        self.refuse_calls()
        for turn in list(self._kept.undelivered.values()):
            self._drop(turn)
        self._count("calls", self.num_calls)
        describe_records(self.episode, self.book.records, self.parts.options.train if is_trained else UNTRAINED)
        self.door.tell(lambda each: each.on_close(is_trained=is_trained))
        self._break_circles()
        return True

    def _break_circles(self) -> None:
        """Let the memory of a closed session be free without a garbage collection, for which all calls would wait."""
        self.book.forget_conversations()
        self.door.fail = self.tools.fail = self.tools.finish = do_nothing  # an error has no reader now
        self.others.admit = self.door.check_open
        for refusal in filter(None, (self.exhausted, self.refused)):
            refusal.__traceback__ = None  # its frames refer to the session

    async def _take_call(self, call: ModelCall, number: int) -> SampledTurn:
        with self.door.inside():
            try:
                self._admit()
                return await self._answer(call, number)
            except CallRefusedError as refusal:
                self._note(refusal)
                raise

    def _note(self, refusal: CallRefusedError) -> None:
        if refusal.kind in ("budget_exhausted", "context_length_exceeded"):
            self.exhausted = refusal
            self.ending.set()
        elif refusal.kind != "session_closed":  # the end refuses calls in flight, and is no reason for itself
            self.refused = refusal
        self._count(f"refused_{refusal.kind}")

    async def _answer(self, call: ModelCall, number: int) -> SampledTurn:
        """Return a turn with an answer counted."""
        self._check(call)
        call = await constrain(call, self.parts, self.episode.capabilities)
        self._fields.count(call, self._count)
        self.others.count_unlisted(call.model)
        rendering = Rendering(self.parts.chat, self.limits.max_tokens, self._rendering)
        while True:
            if (shared := self._kept.find_call(call)) is not None:
                self._count("joined")
                return await shared.wait(call.partial_reply)
            if (kept := self._kept.take(call)) is not None:
                kept.num_answers += 1
                self._count("redelivered")
                return kept
            if self._left.ending:  # a retry may come before the engine has given up the first request
                await asyncio.wait(self._left.ending)
                self._check(call)
                continue  # another request with its key may have started in the meantime
            try:
                started = self._start(call, rendering, number)
            except LongTextError as missing:
                await rendering.prepare(missing)
            else:
                return await started.wait(call.partial_reply)

    def _count_tokens(self, call: ModelCall, rendering: Rendering) -> int:
        with refusing_depth():
            call, tools, location = self.book.locate(call)
            return self.book.count_tokens(self.book.choose(call, tools, location, rendering))

    def _check(self, call: ModelCall) -> None:
        """Refuse a call that the session, or its engine, cannot answer."""
        self._check_open()
        check_request(call, self.parts)
        check_stop(call, self.episode.capabilities)

    def _admit(self) -> None:
        """Count a call; refuse it after the end, or when all calls have been made."""
        self.num_calls += 1
        self._check_open()
        if self.num_calls > (limit := self.parts.options.max_calls):
            raise CallRefusedError("budget_exhausted", f"the session has made its {limit} calls")

    def _check_open(self) -> None:
        self.door.check_open()
        if self._is_over or self.error is not None:
            raise CallRefusedError("session_closed", "the session is over")

    def _start(self, call: ModelCall, rendering: Rendering, number: int) -> SharedCall:
        """Write a call to its record and start to sample. No other call runs in between, for nothing waits here."""
        with refusing_depth():
            prepared, tools, location = self.book.locate(call)
            for turn in self._kept.find_echoed(location.place):  # the transport has not said yet that it is read
                self._deliver(turn)
            choice = self.book.choose(prepared, tools, location, rendering)
        record = self.book.open(prepared, tools, choice)
        for tolerance, times in self.book.tree(call.model).note(location).items():
            self._count(f"echo_{tolerance}", times)
        if choice.reason:
            self._count(f"forks_{choice.reason}")
        if record.turn is not None:  # another request continues the record, so no client waits for the turn
            self._drop(record.turn)
        shared = SharedCall(number, asyncio.get_running_loop().create_future())
        # A separate task, because a retry may wait for it when the first client leaves.
        asked = evolve(call, body=b"", partial_reply=None, outlive=None)
        task = self.spawn(self._sample(prepared, record, shared, asked=asked))
        shared.cancel = lambda: self._cut(call, shared, task)
        shared.leave = lambda: self._left.leave(call, shared, record)
        # A task that is cancelled before its first step runs nothing of its function, so its end is seen here.
        task.add_done_callback(lambda _: None if shared.outcome.done() else self._end_sampling(call, record, shared))
        self._kept.add_call(call, shared)
        return shared

    def _cut(self, call: ModelCall, shared: SharedCall, task: asyncio.Task[None]) -> None:
        """End the sampling of a call."""
        self._kept.remove_call(call, shared)
        self._left.end(task)

    async def _sample(self, call: ModelCall, record: OpenRecord, shared: SharedCall, *, asked: ModelCall) -> None:
        """Sample a turn for the requests that wait; a failure becomes their refusal. `asked` is the call unprepared."""
        self._num_turns += 1
        provenance = {"session": self.name, "record": self.book.records.index(record), "turn": record.num_turns}
        name = record.name + (f"+{provenance['record']}" if record.parent else "")
        ids = self._ids.begin_turn(asked.messages, record_name=name, turn=record.num_turns + 1)
        head = ReplyHead(f"{self.name}-{self._num_turns}", len(record.trajectory), provenance, ids.name_call)
        try:
            result = await self._sampler.sample(call, record, head, shared.partial_replies)
            await self._left.wait_for_request(shared, result)
            # No await from here to `finish`: a turn belongs to the requests that wait from the moment that it exists.
            record.is_sampling = False
            shared.finish(self._keep(call, record, result, head, asked))
        except asyncio.CancelledError:
            self._count("left_calls")
            raise
        except CallRefusedError as refusal:
            shared.fail(refusal)
        except EpisodeEnd as end:
            self.fail(end)
            shared.fail(CallRefusedError("session_closed", str(end)))
        except Exception as error:  # noqa: BLE001 - it ends the session, and its agent reports it
            if (spared := refuse_grammar(error, call)) is not None:
                shared.fail(spared)
                return
            self.fail(error)
            shared.fail(CallRefusedError("engine", f"the engine failed: {error}"))
        finally:
            if record.turn is None or record.turn.call is not asked:
                ids.release()
            self._end_sampling(call, record, shared)

    def _end_sampling(self, call: ModelCall, record: OpenRecord, shared: SharedCall) -> None:
        """Free the record of a call whose sampling has ended, and refuse the requests that still wait for a turn."""
        shared.end(CallRefusedError("session_closed", "the session is over"))
        record.is_sampling = False
        self._left.remove(shared)
        self._kept.remove_call(call, shared)
        self.changed.set()

    def _keep(
        self, call: ModelCall, record: OpenRecord, result: GenerateResult, head: ReplyHead, asked: ModelCall
    ) -> SampledTurn:
        """Return a sampled turn, which the tree knows from now on: its echo may come before its delivery is known."""
        read = self._reader.read(result, call, head.name_call)
        stops = call.stop if read.stop is None else (*call.stop, read.stop)
        place = self.book.tree(call.model).add_turn(record.last_node, read.message, stops)
        for tool_call in read.tool_calls:
            self.book.name_call(tool_call.id, tool_call.name)
        reply = head.whole(result, read, self._reader.token_texts(result.token_ids) if call.logprobs else ())
        record.turn = turn = SampledTurn(record, place, result, reply, asked)
        self._kept.add_turn(turn)
        return turn

    def _deliver(self, turn: SampledTurn) -> None:
        """Append a turn to its record, unless that is done or the turn was dropped."""
        self._kept.note_read(turn)
        if self._kept.undelivered.get(turn.place) is not turn or self._is_closed:
            return
        record = turn.record
        del self._kept.undelivered[turn.place]
        record.turn = None
        try:
            self.episode.append(turn.result, record=record.trajectory)
        except Exception as error:  # noqa: BLE001 - the transport must not see it; it ends the session
            structlog.get_logger().warning("turn not recorded", session=self.name, error=repr(error))
            self.fail(error)
            return
        record.last_node, record.last_text = turn.place, turn.reply.content
        record.num_turns += 1
        record.num_sampled += len(turn.result.token_ids)
        self.transcript.append(DeliveredTurn(turn.call, turn.reply))
        self.refused = None
        record.last_delivery = len(self.transcript)
        self.book.add_point(record)

    def _drop(self, turn: SampledTurn) -> None:
        """Forget a turn that no client has."""
        self._kept.remove_turn(turn)
        turn.record.turn = None
        self.book.tree(turn.call.model).remove_turn(turn.place)
        self._count("left_calls")
        self._left.count_part(turn.result)
