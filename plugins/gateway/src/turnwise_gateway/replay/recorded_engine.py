"""An engine that gives recorded turns again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import define, field

from turnwise import FinishReason
from turnwise.errors import EngineError, GrammarError
from turnwise.protocols.weights import TAGS, Weight
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_gateway.replay.request_file import Event, digest_context, read_result


@define(eq=False)
class RecordedTurn:
    """
    A turn that the engine gives once it is allowed to.

    Attributes:
        call: number of the request that it was sampled for.
        context: number and digest of the tokens before it.
        result: of the recorded engine; None for a turn that no client read, which never ends.
        allowed: set when the recording has come to it.
    """

    call: int
    context: tuple[int, str]
    result: GenerateResult | None
    allowed: asyncio.Event = field(factory=asyncio.Event)


@define(eq=False)
class RecordedEngine:
    """
    An `Engine` that answers a context with the turn that was recorded for it; for any other context it waits.

    Attributes:
        turns: to give, in the order of the calls; a request takes its turn out.
        unknown: requests that wait because no turn was recorded for them, by their ids.
        given: turns of the other requests.
        capabilities: of the engine that was recorded.
    """

    turns: list[RecordedTurn] = field(factory=list)
    unknown: dict[str, asyncio.Future[GenerateResult]] = field(factory=dict)
    given: dict[str, RecordedTurn] = field(factory=dict)
    capabilities: Capabilities = field(factory=Capabilities)
    _constrained: set[str] = field(factory=set, init=False)
    _failed: dict[str, EngineError] = field(factory=dict, init=False)

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        context = len(request.token_ids), digest_context(request.token_ids, request.pictures)
        turn = next((each for each in self.turns if each.context == context), None)
        if turn is None:
            waiting: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
            self.unknown[request.request_id] = waiting
            try:
                return await waiting
            finally:
                del self.unknown[request.request_id]
        self.turns.remove(turn)
        self.given[request.request_id] = turn
        if request.grammar is not None:
            self._constrained.add(request.request_id)
        try:
            await turn.allowed.wait()
            if self.given.pop(request.request_id, None) is not None:
                assert turn.result is not None, "a turn that no client read is not allowed"
                return turn.result
        except asyncio.CancelledError:
            self._take_back(request.request_id, turn)
            raise
        self._take_back(request.request_id, turn)
        if (error := self._failed.pop(request.request_id, None)) is not None:
            raise error
        return _nothing()

    def fail(self, kind: type[EngineError]) -> bool:
        """
        Fail a request with an error of a class; return whether there is one.

        It is the oldest without a turn, or else the newest that waits for its turn: another request with the same
        context was recorded. A `GrammarError` is only for a request with a grammar.
        """
        error = kind("the engine failed when the session was recorded")
        waiting = next((each for each in self.unknown.values() if not each.done()), None)
        if waiting is not None:
            waiting.set_exception(error)
            return True
        for request_id in reversed(self.given):
            turn = self.given[request_id]
            if not turn.allowed.is_set() and (kind is not GrammarError or request_id in self._constrained):
                self._failed[request_id] = error
                del self.given[request_id]
                turn.allowed.set()
                return True
        return False

    async def abort(self, request_id: str) -> None:
        """End a request with no token."""
        if (turn := self.given.pop(request_id, None)) is not None:
            turn.allowed.set()
        elif (waiting := self.unknown.get(request_id)) is not None and not waiting.done():
            waiting.set_result(_nothing())

    async def sleep(self, level: int) -> None:
        """Refuse: there is no memory to free."""
        raise EngineError(f"a recorded engine has no sleep level {level}")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Refuse: there are no weights."""
        raise EngineError(f"a recorded engine has no weights to update to version {version}")

    def stats(self) -> Mapping[str, float]:
        return {"num_running": 0}

    async def stop(self) -> None:
        """Fail the requests that wait."""
        for waiting in self.unknown.values():
            if not waiting.done():
                waiting.set_exception(EngineError("the engine was stopped"))

    def _take_back(self, request_id: str, turn: RecordedTurn) -> None:
        """Keep a turn whose request has ended without it: it was another request's, such as a retry's."""
        self.given.pop(request_id, None)
        turn.allowed.clear()
        self.turns.insert(0, turn)


def read_turns(events: Iterable[Event]) -> list[tuple[Event, RecordedTurn]]:
    """Return the answers with turns that were sampled for them."""
    answers = (event for event in events if event["event"] == "answer" and "result" in event)
    # Files of earlier versions have no `sampled_for`.
    calls = ((event, event["sampled_for" if "sampled_for" in event else "call"]) for event in answers)
    return [(event, RecordedTurn(call, tuple(event["context"]), read_result(event))) for event, call in calls]


def read_unread_turns(events: Sequence[Event]) -> list[RecordedTurn]:
    """Return the turns that were sampled for retries which never came."""
    read = {turn.call for _, turn in read_turns(events)}
    kept = (event for event in events if event["event"] == "kept" and event["call"] not in read)
    return [RecordedTurn(event["call"], tuple(event["context"]), None) for event in kept]


def _nothing() -> GenerateResult:
    none = np.zeros(0, np.int32)
    return GenerateResult(token_ids=none, logprobs=none.astype(np.float32), finish_reason=FinishReason.ABORT)
