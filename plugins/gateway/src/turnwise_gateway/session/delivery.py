"""
Sampled turns on their way to a client.

A turn is sampled, then delivered, and only then part of its record: a turn that no client has read must not be trained.
A client that breaks off before gets the same turn for the same request. So does a client whose connection broke after
the last byte and before it had read the response; that turn is part of its record already.

Equal requests may also be samples of one prompt. So a turn that a client has read answers another request only if both
have the same key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from attrs import define, field

from turnwise_gateway.calls import ModelCall, ModelReply, PartialReply
from turnwise_gateway.session.records import ResumePoint, SampledTurn
from turnwise_gateway.tree.places import ConversationNode

Outcome = Literal["delivered", "released", "lost"]
"""The client has the answer, left before it had the last byte, or broke the connection after it."""


@define(eq=False)
class TurnAnswer:
    """
    The `Answer` with a sampled turn.

    Attributes:
        turn: to deliver.
        note: called with what became of the answer, before anything is done about it.
        deliver: makes the turn part of its record, unless it is.
        lost: called when the client may not have read the delivered turn.
        settled: called when the client has the turn or has left.
    """

    turn: SampledTurn
    note: Callable[[Outcome], None]
    deliver: Callable[[SampledTurn], None]
    lost: Callable[[SampledTurn], None]
    settled: Callable[[], None]
    _is_settled: bool = field(default=False, init=False)

    @property
    def reply(self) -> ModelReply:
        return self.turn.reply

    def confirm(self) -> None:
        self.note("delivered")
        if self._settle():
            self.deliver(self.turn)

    def release(self) -> None:
        self.note("released")
        self._settle()

    def lose(self) -> None:
        self.note("lost")
        self.lost(self.turn)

    def _settle(self) -> bool:
        first, self._is_settled = not self._is_settled, True
        self.turn.num_answers -= first
        self.settled()
        return first


def do_nothing(*_: object) -> None:
    """Take the place of a method of an object that has ended."""


@define(eq=False)
class SharedCall:
    """
    A call that is being sampled, and the requests that wait for it: the first one, and its retries.

    Attributes:
        number: of the first request, in its session.
        outcome: the turn, or the refusal.
        cancel: ends the sampling.
        leave: called when the last request has left.
        partial_replies: of the requests that are streams, also of clients that have left.
    """

    number: int
    outcome: asyncio.Future[SampledTurn]
    cancel: Callable[[], object] = do_nothing
    leave: Callable[[], object] = do_nothing
    num_waiting: int = 0
    partial_replies: list[PartialReply] = field(factory=list)
    _joined: asyncio.Event = field(factory=asyncio.Event, init=False)

    async def wait(self, partial_reply: PartialReply | None = None) -> SampledTurn:
        """
        Return the turn, with an answer counted; when the last request is cancelled, the sampling ends.

        Args:
            partial_reply: of a stream; it also receives what was sampled before it came.
        """
        if partial_reply is not None:
            if self.partial_replies:
                partial_reply.read = self.partial_replies[-1].read
                partial_reply.changed.set()
            self.partial_replies.append(partial_reply)
        self.num_waiting += 1
        self._joined.set()
        try:
            # Shielded: a request that leaves must not cancel the turn of the others.
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            if self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None:
                self.outcome.result().num_answers -= 1  # `finish` has counted this request
            raise
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0 and not self.outcome.done():
                self.leave()

    async def wait_for_request(self) -> None:
        """Wait until a request waits for the turn."""
        while self.num_waiting == 0:
            self._joined.clear()
            await self._joined.wait()

    def finish(self, turn: SampledTurn) -> None:
        """Hand a turn to all requests that wait."""
        # Counted before they run again, so that no other call takes the record for free in between.
        turn.num_answers += self.num_waiting
        turn.number = self.number
        self.outcome.set_result(turn)

    def end(self, error: Exception) -> None:
        """Take note that the sampling has ended, with an error if there is no turn."""
        self.fail(error)
        self.cancel = self.leave = do_nothing  # they refer to this call

    def fail(self, error: Exception) -> None:
        """Raise an error in all requests that wait."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # read here, for the last request may have left


@define(eq=False)
class KeptTurns:
    """
    The turns and calls of a session that a repeated request may get.

    Attributes:
        in_flight: calls that are being sampled, or whose turn waits for a retry, in their order.
        undelivered: turns that no client has, by their place in the conversation.
    """

    in_flight: dict[SharedCall, ModelCall] = field(factory=dict, init=False)
    undelivered: dict[ConversationNode[ResumePoint], SampledTurn] = field(factory=dict, init=False)
    _keyed_calls: dict[tuple[str, str], SharedCall] = field(factory=dict, init=False)
    _keyed_turns: dict[tuple[str, str], SampledTurn] = field(factory=dict, init=False)
    _lost: list[SampledTurn] = field(factory=list, init=False)

    @property
    def is_idle(self) -> bool:
        """Whether no turn is on its way to a client."""
        return not any(turn.num_answers for turn in self.undelivered.values())

    def add_call(self, call: ModelCall, shared: SharedCall) -> None:
        """Keep a call that begins to be sampled."""
        self.in_flight[shared] = call
        if call.key:
            self._keyed_calls[call.key, call.digest] = shared

    def remove_call(self, call: ModelCall, shared: SharedCall) -> None:
        """Forget a call whose sampling has ended."""
        self.in_flight.pop(shared, None)
        if self._keyed_calls.get((call.key, call.digest)) is shared:
            del self._keyed_calls[call.key, call.digest]

    def find_call(self, call: ModelCall) -> SharedCall | None:
        """Return the call in flight that a request repeats: by its key, or marked as a retry of one that was left."""
        if call.key:
            return self._keyed_calls.get((call.key, call.digest))
        if not call.is_marked or not call.digest:
            return None
        # A call whose client is there may be another sample of the prompt, and is not this request's.
        left = (shared for shared, each in self.in_flight.items() if each.digest == call.digest and not each.key)
        return next((shared for shared in left if shared.num_waiting == 0), None)

    def add_turn(self, turn: SampledTurn) -> None:
        """Keep a turn that no client has yet."""
        self.undelivered[turn.place] = turn
        if turn.call.key:
            self._keyed_turns[turn.call.key, turn.call.digest] = turn

    def remove_turn(self, turn: SampledTurn) -> None:
        """Forget a turn that no client will get."""
        del self.undelivered[turn.place]
        if self._keyed_turns.get((turn.call.key, turn.call.digest)) is turn:
            del self._keyed_turns[turn.call.key, turn.call.digest]

    def lose(self, turn: SampledTurn) -> None:
        """Keep a delivered turn for the next equal request."""
        if not turn.call.key:  # a turn with a key is kept anyway
            self._lost.append(turn)

    def waiting(self) -> list[SampledTurn]:
        """Return the turns that no client is known to have read."""
        return [*self.undelivered.values(), *self._lost]

    def find_echoed(self, place: ConversationNode[ResumePoint]) -> list[SampledTurn]:
        """Return the waiting turns in a conversation that a client sends: it has read them."""
        waiting = {turn.place: turn for turn in self.waiting()}
        found, step = [], place if waiting else None
        while step is not None:
            found += [waiting[step]] if step in waiting else []
            step = step.parent
        return found

    def note_read(self, turn: SampledTurn) -> None:
        """Say that a client has read a delivered turn, so that no other request gets it."""
        if turn in self._lost:
            self._lost.remove(turn)

    def take(self, call: ModelCall) -> SampledTurn | None:
        """Return the turn of the request that a call repeats; None for a new request."""
        if call.key:
            return self._keyed_turns.get((call.key, call.digest))
        if not call.digest:
            return None
        for turn in self.waiting():
            if turn.call.digest == call.digest and not turn.call.key and turn.num_answers == 0:
                return turn
        return None
