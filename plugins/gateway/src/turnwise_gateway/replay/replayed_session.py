"""
Replays a session: sends its requests over HTTP in the recorded order, and compares what the gateway makes of them.

The recording decides the order of everything: a request is sent when its turn has come, the engine answers when the
recording says so, and a turn counts as delivered when it did then. So the replay does not depend on time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from itertools import zip_longest
from reprlib import repr as shorten
from typing import Any, Final

import aiohttp
from attrs import define, field, frozen

from turnwise import Episode
from turnwise.errors import EngineError, GrammarError
from turnwise_gateway.calls import Answer, CallRefusedError, ModelCall, ModelReply
from turnwise_gateway.host import ModelClient
from turnwise_gateway.replay.recorded_engine import RecordedEngine, RecordedTurn, read_turns, read_unread_turns
from turnwise_gateway.replay.request_file import Event, RequestFile, describe_episode_records, read_body
from turnwise_gateway.session.door import SessionListener
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session, Spawn

_FAILURES: Final = {"engine": EngineError, "grammar": GrammarError}
"""The errors of the engine, by the kind of the refusal that each became."""
PATIENCE_S: Final = 20.0
"""Longest wait for the gateway to do what was recorded."""


class DifferenceError(Exception):
    """The gateway does something else than what was recorded."""


@define(eq=False)
class _Call:
    """A request of the recording, as it goes in the replay."""

    number: int
    arrived: asyncio.Event = field(factory=asyncio.Event)
    settled: asyncio.Event = field(factory=asyncio.Event)
    outcome: str = "no answer"
    answer: Answer | None = None
    sending: asyncio.Task[None] | None = None


@frozen(eq=False)
class _HeldAnswer:
    """An answer whose delivery the recording decides."""

    answer: Answer

    @property
    def reply(self) -> ModelReply:
        return self.answer.reply

    def confirm(self) -> None:
        """Leave it to the recording."""

    def release(self) -> None:
        """Leave it to the recording."""

    def lose(self) -> None:
        """Leave it to the recording."""


@define(eq=False)
class SessionReplay(SessionListener):
    """
    The replay of a file of requests.

    Attributes:
        file: with the requests.
        engine: gives the recorded turns.
        records: of the replayed session, once it is over.
    """

    file: RequestFile
    engine: RecordedEngine
    records: list[Event] = field(factory=list, init=False)
    _session: Session | None = field(default=None, init=False)
    _calls: list[_Call] = field(factory=list, init=False)
    _turns: dict[int, RecordedTurn] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._turns = {event["call"]: turn for event, turn in read_turns(self.file.events)}
        kept = read_unread_turns(self.file.events)
        self.engine.turns[:] = sorted([*self._turns.values(), *kept], key=lambda turn: turn.call)
        self.engine.capabilities = self.file.capabilities

    def open(self, episode: Episode, parts: SessionParts, name: str, spawn: Spawn) -> Session:
        """Return the session to send the requests to."""
        self._session = session = ReplayedSession(episode, parts, name, spawn, replay=self)
        session.door.listeners.append(self)
        return session

    def on_close(self, *, is_trained: bool) -> None:
        assert self._session is not None, "a session ends after its start"
        self.records = describe_episode_records(self._session.episode)

    async def hold_answer(self, answering: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for the answer to the request that was sent last, and return it for the recording to settle."""
        state = self._calls[-1]  # the next request is sent when this one has arrived
        state.arrived.set()
        try:
            state.answer = await answering
        except CallRefusedError as refusal:
            state.outcome = f"refused ({refusal.kind})"
            raise
        except asyncio.CancelledError:
            state.outcome = "left"
            raise
        finally:
            state.settled.set()
        provenance = state.answer.reply.provenance
        state.outcome = f"turn {provenance['turn']} of record {provenance['record']}"
        return _HeldAnswer(state.answer)

    def note_refusal(self, refusal: CallRefusedError) -> None:
        """Note that the gateway has refused the request that was sent last."""
        state = self._calls[-1]
        state.outcome = f"refused ({refusal.kind})"
        state.arrived.set()
        state.settled.set()

    async def run(self, client: ModelClient) -> None:
        """
        Send the requests.

        Raises:
            DifferenceError: the gateway does not answer as it was recorded.
        """
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http, asyncio.TaskGroup() as group:
            try:
                for event in self.file.events:
                    await self._follow(event, client, http, group)
            finally:
                for call in self._calls:
                    if call.sending is not None:
                        call.sending.cancel()

    async def _follow(
        self, event: Event, client: ModelClient, http: aiohttp.ClientSession, group: asyncio.TaskGroup
    ) -> None:
        if event["event"] == "call":
            call = _Call(event["call"])
            self._calls.append(call)
            if (body := read_body(event, self.file.data)) is None:  # it cannot be sent again
                return
            url = client.anthropic_base_url + event["path"]
            call.sending = group.create_task(_send(http, url, body, event["headers"]))
            await self._wait(call, call.arrived, "arrives")
            return
        call = self._calls[event["call"]]
        if call.sending is None or event["event"] == "kept":
            return
        match event["event"]:
            case "answer":
                if call.number in self._turns:
                    self._turns[call.number].allowed.set()
                await self._expect(call, f"turn {event['number']} of record {event['record']}")
            case "refused" if event["kind"] != "session_closed":  # that comes with the end, here and there
                if (kind := _FAILURES.get(event["kind"])) is not None:
                    await self._fail(call, kind)
                await self._expect(call, f"refused ({event['kind']})")
            case "left":
                call.sending.cancel()
                await self._expect(call, "left")
            case outcome if call.answer is not None:
                self._settle(outcome, call.answer)

    async def _fail(self, call: _Call, kind: type[EngineError]) -> None:
        """Fail the request of a call in the engine, as soon as it is there, unless the call ends before."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (self.engine.fail(kind) or call.settled.is_set()):  # noqa: ASYNC110 - either may come first
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise DifferenceError(f"call {call.number}: it never reaches the engine, which failed") from None

    def _settle(self, outcome: str, answer: Answer) -> None:
        """Tell the session the recorded outcome of an answer."""
        assert self._session is not None, "answers come after the start"
        match outcome:
            case "delivered":
                answer.confirm()
            case "released":
                answer.release()
            case "lost":
                answer.lose()
            case "read":
                self._session.deliver(answer.reply.id)

    async def _expect(self, call: _Call, expected: str) -> None:
        await self._wait(call, call.settled, f"ends as recorded, {expected}")
        if call.outcome != expected:
            raise DifferenceError(f"call {call.number}: recorded {expected}, replayed {call.outcome}")

    async def _wait(self, call: _Call, event: asyncio.Event, text: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await event.wait()
        except TimeoutError:
            raise DifferenceError(f"call {call.number}: it never {text}") from None


@define(eq=False)
class ReplayedSession(Session):
    """
    A session whose answers are settled by a recording.

    Attributes:
        replay: of the recording.
    """

    replay: SessionReplay = field(kw_only=True)

    def note_refusal(self, call: ModelCall, refusal: CallRefusedError) -> None:
        super().note_refusal(call, refusal)
        self.replay.note_refusal(refusal)

    async def answer(self, call: ModelCall) -> Answer:
        return await self.replay.hold_answer(super().answer(call))


async def _send(http: aiohttp.ClientSession, url: str, body: bytes, given: Mapping[str, str]) -> None:
    headers = {"Content-Type": "application/json", **given}
    try:
        async with http.post(url, data=body, headers=headers) as response:
            await response.read()
    except aiohttp.ClientError:
        return  # a stream that was refused half-way breaks, as it did when it was recorded


def find_difference(recorded: Sequence[Event], replayed: Sequence[Event]) -> str | None:
    """Return the first difference between the records of two sessions; None when they are equal."""
    if len(recorded) != len(replayed):
        return f"recorded {len(recorded)} records, replayed {len(replayed)}"
    for number, (before, after) in enumerate(zip(recorded, replayed, strict=True)):
        # The ids first: where they differ, everything else does too.
        for name in sorted(before.keys() | after.keys(), key=lambda name: (name != "token_ids", name)):
            if before.get(name) != after.get(name):
                return f"record {number}: {name} {_describe(before.get(name), after.get(name))}"
    return None


def _describe(before: object, after: object) -> str:
    if isinstance(before, list) and isinstance(after, list):
        place = next(_differing(before, after))
        shown = [shorten(each[place]) if place < len(each) else "nothing" for each in (before, after)]
        return f"at {place}: recorded {shown[0]}, replayed {shown[1]}"
    return f"recorded {shorten(before)}, replayed {shorten(after)}"


def _differing(before: list[object], after: list[object]) -> Iterator[int]:
    pairs = zip_longest(before, after, fillvalue=object())
    return (place for place, (left, right) in enumerate(pairs) if left != right)
